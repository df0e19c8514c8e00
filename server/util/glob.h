// glob.h: the one kind of pattern of every file that we read.
//
// * stands for any number of characters, ? for one; all other characters,
// brackets and backslashes too, stand for themselves.  Names of runs, identities
// and approvers are no file names: a class of letters that grants more than its
// author read is worse than one that cannot be written.
//
// Pure; any thread.

#ifndef BELLWETHER_SERVER_UTIL_GLOB_H_
#define BELLWETHER_SERVER_UTIL_GLOB_H_

#include <string_view>

namespace bellwether::server {

// True if all of `text` fits `pattern`.  Time: at most the product of both lengths.
bool GlobMatches(std::string_view pattern, std::string_view text);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_GLOB_H_
