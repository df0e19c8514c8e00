// json_text.h: a message as JSON.
//
// The JSON is protobuf's own with the names of the .proto and every field
// shown.  protobuf makes a tree of the answer first, some 250 bytes for each
// number, so that a series of 20 bytes a point took a kilobyte of memory a
// point.  This code writes as it goes.

#ifndef BELLWETHER_SERVER_QUERY_JSON_TEXT_H_
#define BELLWETHER_SERVER_QUERY_JSON_TEXT_H_

#include <google/protobuf/message.h>

#include <string>

namespace bellwether::server {

// 64-bit integers are strings, bytes base64, enums their names; numbers that JSON does
// not know are "NaN", "Infinity", "-Infinity"; text that is not UTF-8 gets U+FFFD.
std::string ToJsonText(const google::protobuf::Message& message);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_JSON_TEXT_H_
