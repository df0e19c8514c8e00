// recording.h: reads and writes .bwrun files.
//
// The format is specified in recording.proto.  A reader takes no more than
// `message_bytes_max` for one message whatever the file says, and reports a
// truncated or damaged file instead of guessing.
//
// Not thread-safe; one object, one thread.

#ifndef BELLWETHER_RECORDING_H_
#define BELLWETHER_RECORDING_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "bellwether/v1/recording.pb.h"

namespace bellwether {

inline constexpr std::string_view kRecordingMagic{"BWRUN\0\0\1", 8};

// Compresses messages and hands the bytes to a sink as they come.
class RecordingWriter {
 public:
  // Returns false to stop; the writer is then failed.
  using Sink = std::function<bool(std::string_view bytes)>;

  explicit RecordingWriter(Sink sink, int zstd_level = 3);
  ~RecordingWriter();
  RecordingWriter(const RecordingWriter&) = delete;
  RecordingWriter& operator=(const RecordingWriter&) = delete;

  // False once anything failed: the sink refused, or zstd did.
  bool Write(const v1::RecordedMessage& message);
  // Makes everything so far readable.  Costs compression; not per message.
  bool Flush();
  // Ends the stream with its checksum.  Nothing may be written after it.
  bool Finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Reads a recording from pieces of any size.
class RecordingReader {
 public:
  enum class Result {
    kMessage,   // `*message` was filled.
    kNeedMore,  // Feed() more bytes.
    kEnd,       // The stream ended as it should.
    kError,     // error() says what is wrong; final.
  };

  explicit RecordingReader(uint32_t message_bytes_max = 1 << 20);
  ~RecordingReader();
  RecordingReader(const RecordingReader&) = delete;
  RecordingReader& operator=(const RecordingReader&) = delete;

  void Feed(std::string_view bytes);
  Result Next(v1::RecordedMessage* message);
  const std::string& error() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace bellwether

#endif  // BELLWETHER_RECORDING_H_
