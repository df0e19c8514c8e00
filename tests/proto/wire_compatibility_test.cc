// Goal: today's wire is a superset of the wire of the committed descriptor: old
// clients and new servers, and the reverse, keep understanding each other.
// Method: every message, field, enum value and method of
// tests/testdata/wire_v1.binpb must still be there with its number, type and
// label; a planted renumbering shows that the comparison sees.  A wire that
// only grew is committed anew with
//   protoc -Iproto --descriptor_set_out=tests/testdata/wire_v1.binpb
//     bellwether/v1/{signals,runs,alerts,actions,ingest,query,recording}.proto

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.pb.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "bellwether/v1/query.pb.h"
#include "bellwether/v1/recording.pb.h"

namespace bellwether {
namespace {

using google::protobuf::DescriptorProto;
using google::protobuf::EnumDescriptorProto;
using google::protobuf::FileDescriptorProto;
using google::protobuf::FileDescriptorSet;
using testing::IsEmpty;
using testing::SizeIs;

// Every fact of the wire that must not change: what -> how.
using Facts = std::map<std::string, std::string>;

void AddEnum(const std::string& scope, const EnumDescriptorProto& type, Facts* facts) {
  for (const auto& value : type.value()) {
    (*facts)[scope + type.name() + "." + value.name()] = std::to_string(value.number());
  }
}

void AddMessage(const std::string& scope, const DescriptorProto& type, Facts* facts) {
  const std::string name = scope + type.name();
  for (const auto& field : type.field()) {
    (*facts)[name + "." + field.name()] = std::to_string(field.number()) + " " + std::to_string(field.type()) + " " +
                                          std::to_string(field.label()) + " " + field.type_name();
  }
  for (const auto& nested : type.nested_type()) AddMessage(name + ".", nested, facts);
  for (const auto& nested : type.enum_type()) AddEnum(name + ".", nested, facts);
}

Facts FactsOf(const FileDescriptorSet& files) {
  Facts facts;
  for (const FileDescriptorProto& file : files.file()) {
    for (const auto& message : file.message_type()) AddMessage("", message, &facts);
    for (const auto& type : file.enum_type()) AddEnum("", type, &facts);
    for (const auto& service : file.service()) {
      for (const auto& method : service.method()) {
        facts[service.name() + "." + method.name()] = method.input_type() + " " + method.output_type() + " " +
                                                      std::to_string(method.client_streaming()) +
                                                      std::to_string(method.server_streaming());
      }
    }
  }
  return facts;
}

FileDescriptorSet Committed() {
  FileDescriptorSet files;
  std::ifstream in(std::string(BELLWETHER_TESTDATA) + "/wire_v1.binpb", std::ios::binary);
  EXPECT_TRUE(files.ParseFromIstream(&in));
  return files;
}

FileDescriptorSet Today() {
  FileDescriptorSet files;
  for (const auto* file :
       {v1::Signal_descriptor()->file(), v1::Run::descriptor()->file(), v1::Transition::descriptor()->file(),
        v1::Action::descriptor()->file(), v1::ClientMessage::descriptor()->file(),
        v1::ListRunsRequest::descriptor()->file(), v1::RecordedMessage::descriptor()->file()}) {
    file->CopyTo(files.add_file());
  }
  return files;
}

// What of `before` is gone or different in `after`.
std::vector<std::string> Broken(const Facts& before, const Facts& after) {
  std::vector<std::string> broken;
  for (const auto& [what, how] : before) {
    const auto now = after.find(what);
    if (now == after.end()) {
      broken.push_back(what + " is gone");
    } else if (now->second != how) {
      broken.push_back(what + " was " + how + " and is " + now->second);
    }
  }
  return broken;
}

TEST(WireCompatibilityTest, NothingOfTheCommittedWireChanged) {
  const Facts before = FactsOf(Committed());
  ASSERT_GT(before.size(), 300u);
  EXPECT_THAT(Broken(before, FactsOf(Today())), IsEmpty());
}

TEST(WireCompatibilityTest, TheCommittedWireIsComplete) {
  EXPECT_THAT(Broken(FactsOf(Today()), FactsOf(Committed())), IsEmpty()) << "commit the descriptor anew, see the top";
}

TEST(WireCompatibilityTest, SeesAPlantedRenumbering) {
  FileDescriptorSet planted = Committed();
  planted.mutable_file(0)->mutable_enum_type(0)->mutable_value(1)->set_number(77);
  EXPECT_THAT(Broken(FactsOf(Committed()), FactsOf(planted)), SizeIs(1));
}

}  // namespace
}  // namespace bellwether
