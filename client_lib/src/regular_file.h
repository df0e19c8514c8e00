// regular_file.h: files that people name, opened without ever waiting for them.
//
// A FIFO makes open() wait for its other end, a device may have no end at all,
// and a rename over either replaces it.  All of them are refused, with what
// they are; so are folders and sockets.  Links are followed.

#ifndef BELLWETHER_CLIENT_LIB_SRC_REGULAR_FILE_H_
#define BELLWETHER_CLIENT_LIB_SRC_REGULAR_FILE_H_

#include <sys/types.h>

#include <cstddef>
#include <string>

namespace bellwether::client {

// As open() with O_CLOEXEC, for a regular file, or with O_CREAT for one that is
// not there yet.  O_TRUNC empties the file after it was found to be regular.
// -1 with `*error` = what is wrong, without the path, and errno.
int OpenRegularFile(const std::string& path, int flags, mode_t mode, std::string* error);

// The whole file.  False with `*error` as above, also where it has more than
// `bytes_max` bytes.
bool ReadRegularFile(const std::string& path, size_t bytes_max, std::string* text, std::string* error);

// Whether a regular file could be there, or is.  False with `*error` as above.
bool CanBeRegularFile(const std::string& path, std::string* error);

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SRC_REGULAR_FILE_H_
