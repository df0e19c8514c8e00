// recorder.h: writes the run to a .bwrun file.
//
// A file of an earlier run at the same path is kept as PATH.1, PATH.2, ...
// What a killed sender left is taken over whole message by whole message.
// Not thread-safe.

#ifndef BELLWETHER_CLIENT_LIB_SENDER_RECORDER_H_
#define BELLWETHER_CLIENT_LIB_SENDER_RECORDER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "bellwether/recording.h"
#include "bellwether/v1/ingest.pb.h"

namespace bellwether::client {

class Recorder {
 public:
  Recorder(std::string path, uint32_t rank);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // Opens the file and writes `hello`, or, with `resume`, goes on behind what
  // is readable there.  False with error() set.
  bool Open(const v1::ClientMessage& hello, bool resume);

  // Adds a message: `ordinal` becomes its seq; 0 = none.
  bool Write(uint64_t ordinal, std::string_view body);
  // Makes everything so far readable; `sync`: also on disk.
  bool Flush(bool sync);
  // Ends the file with its checksum, on disk.
  bool Finish();

  uint64_t written_ordinal() const { return written_ordinal_; }
  uint64_t readable_ordinal() const { return readable_ordinal_; }
  uint64_t pending_bytes() const { return pending_bytes_; }
  const std::string& error() const { return error_; }

 private:
  bool OpenNew(const std::string& path);
  bool KeepEarlierFile();
  bool Resume();
  bool TakeOver(int old);
  bool WriteMessage(const v1::RecordedMessage& message);
  bool Fail(const std::string& what);

  const std::string path_;
  const uint32_t rank_;
  int fd_ = -1;
  std::unique_ptr<RecordingWriter> writer_;
  uint64_t written_ordinal_ = 0;
  uint64_t readable_ordinal_ = 0;
  uint64_t pending_bytes_ = 0;
  std::string error_;
};

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SENDER_RECORDER_H_
