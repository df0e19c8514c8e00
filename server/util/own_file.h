// own_file.h: a file that this process made, removed only while it is still that one.
//
// A name may be another's by the time that its maker ends: a second server that
// was told the same ready file, or that bound the same socket's path after
// somebody had removed it.  An inode tells them apart, and a descriptor holds it,
// so that its number is not given again.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_UTIL_OWN_FILE_H_
#define BELLWETHER_SERVER_UTIL_OWN_FILE_H_

#include <string>

namespace bellwether::server {

class OwnFile {
 public:
  OwnFile() = default;  // None.
  ~OwnFile();           // Leaves it where it is.
  OwnFile(const OwnFile&) = delete;
  OwnFile& operator=(const OwnFile&) = delete;

  // Takes what is at `path` for this process's own: a file, or a socket that was
  // bound.  False: nothing is there, errno says why; nothing will be removed.
  bool Take(const std::string& path);
  // As rename(2), over what is at `to`; the file is still this process's own there.
  bool Rename(const std::string& to);
  // Lets go of the file.  False: it was not removed, as it is gone or something
  // else is there by now.
  bool Remove();

 private:
  void LetGo();

  std::string path_;
  int fd_ = -1;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_OWN_FILE_H_
