// secret_file.h: files that hold keys or rights.

#ifndef BELLWETHER_SERVER_ACCESS_SECRET_FILE_H_
#define BELLWETHER_SERVER_ACCESS_SECRET_FILE_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace bellwether::server {

enum class Secrecy {
  kSecret,     // Neither readable nor writable for others; the group may read, as Kubernetes wants.
  kIntegrity,  // Not writable for group and others.
};

// NOT_FOUND (also: this process may not read it), INVALID_ARGUMENT (longer than
// 1 MiB, no plain file), FAILED_PRECONDITION (its mode is too open): names file,
// mode, user and remedy.
absl::StatusOr<std::string> ReadGuardedFile(const std::string& path, Secrecy secrecy);

// Appears whole, synced, with that mode, or not at all.  ALREADY_EXISTS unless
// `replace`.  A file that is replaced keeps its owner, its group and what
// `secrecy` allows of its mode: root writes what a service reads.  INTERNAL: it
// cannot be written, or not with that owner.
absl::Status WriteSecretFile(const std::string& path, std::string_view text, bool replace, mode_t mode = 0600,
                             Secrecy secrecy = Secrecy::kSecret);

// Changes when the file does; 0 = there is no file.
class FileStamp {
 public:
  // True if the file is another than at the last call; at the first: true.
  bool Changed(const std::string& path);

 private:
  bool asked_ = false;
  int64_t inode_ = 0, size_ = 0, modified_ns_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACCESS_SECRET_FILE_H_
