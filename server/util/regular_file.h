// regular_file.h: a file that people name, read whole.

#ifndef BELLWETHER_SERVER_UTIL_REGULAR_FILE_H_
#define BELLWETHER_SERVER_UTIL_REGULAR_FILE_H_

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace bellwether::server {

struct RegularFile {
  std::string text;
  mode_t mode = 0;
};

// NOT_FOUND: it cannot be opened.  INVALID_ARGUMENT: it is a directory, a device
// or a pipe, or longer than `bytes_max`.  Never waits for a writer.
absl::StatusOr<RegularFile> ReadRegularFile(const std::string& path, size_t bytes_max);

// INVALID_ARGUMENT for text that is not UTF-8, with file, line and column of its
// first byte that is none.
absl::Status CheckUtf8(std::string_view text, const std::string& file);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_REGULAR_FILE_H_
