// sender_log.h: the sender's messages to people, one line at most per cause.
//
// They go to a file, or to the trainer's stderr.  The latter only while the
// trainer lives, because a held stderr keeps its reader waiting.  Not
// thread-safe.

#ifndef BELLWETHER_CLIENT_LIB_SENDER_SENDER_LOG_H_
#define BELLWETHER_CLIENT_LIB_SENDER_SENDER_LOG_H_

#include <set>
#include <string>

namespace bellwether::client {

class SenderLog {
 public:
  // `path` empty = stderr.  A file that cannot be opened means stderr.
  SenderLog(const std::string& path, std::string prefix);
  ~SenderLog();
  SenderLog(const SenderLog&) = delete;
  SenderLog& operator=(const SenderLog&) = delete;

  // Writes one line the first time that `cause` is named.
  void Once(const std::string& cause, const std::string& text);
  // Closes the trainer's stderr; nothing is written to it any more.
  void LetGoOfStderr();

 private:
  int fd_;
  std::string prefix_;
  std::set<std::string> seen_;
};

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SENDER_SENDER_LOG_H_
