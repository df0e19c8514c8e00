// clean_text.h: text of strangers, made fit for a log line, a label or a terminal.

#ifndef BELLWETHER_SERVER_UTIL_CLEAN_TEXT_H_
#define BELLWETHER_SERVER_UTIL_CLEAN_TEXT_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace bellwether::server {

// Bytes of the valid UTF-8 character at the start of `text`; 0: not valid.
size_t Utf8Length(std::string_view text);

// Whether a character, valid UTF-8, is invisible and still changes what is
// seen: control characters of both sets, line separators, changes of direction.
bool IsControl(std::string_view character);

// One line of valid UTF-8, at most `bytes_max` bytes, cut between characters.  A
// control becomes a space, a byte that is no UTF-8 a question mark.
std::string CleanText(std::string_view text, size_t bytes_max);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_CLEAN_TEXT_H_
