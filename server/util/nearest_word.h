// nearest_word.h: what a slip of the pen may have meant.

#ifndef BELLWETHER_SERVER_UTIL_NEAREST_WORD_H_
#define BELLWETHER_SERVER_UTIL_NEAREST_WORD_H_

#include <span>
#include <string>
#include <string_view>

namespace bellwether::server {

// The one of `words` that needs the fewest letters added, left out or changed: at most one of a
// short word, two from eight letters on.  "": none is that near.
std::string NearestWord(std::string_view typed, std::span<const std::string> words);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_NEAREST_WORD_H_
