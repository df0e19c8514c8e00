// A recording is one in one piece or in many, with the same messages.  Of what is
// damaged zstd gives up earlier where it has it all at once, takes some in pieces
// that it refuses in one (corpus/recording/size_that_lies: fewer bytes than its frame
// says), and refuses some in pieces that it takes in one (empty_run: a byte repeated
// zero times, which no writer makes).

#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "bellwether/recording.h"
#include "tests/fuzz/fuzz.h"

namespace {

struct Outcome {
  int messages = 0;
  bellwether::RecordingReader::Result result;
  std::string error;
  bool operator==(const Outcome&) const = default;
};

Outcome Read(std::string_view bytes, size_t piece) {
  bellwether::RecordingReader reader(1 << 16);
  bellwether::v1::RecordedMessage message;
  int messages = 0;
  for (;;) {
    const auto result = reader.Next(&message);
    if (result == bellwether::RecordingReader::Result::kMessage) {
      ++messages;
    } else if (result == bellwether::RecordingReader::Result::kNeedMore && !bytes.empty()) {
      reader.Feed(bytes.substr(0, piece));
      bytes.remove_prefix(std::min(piece, bytes.size()));
    } else {
      FUZZ_CHECK(result != bellwether::RecordingReader::Result::kError || !reader.error().empty());
      return {messages, result, reader.error()};
    }
    if (messages > 10'000) return {messages, bellwether::RecordingReader::Result::kNeedMore, ""};
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const Outcome whole = Read(bytes, std::max<size_t>(size, 1));
  const Outcome pieces = Read(bytes, 7);
  const std::string zstd = ZSTD_getErrorString(ZSTD_error_corruption_detected);
  const bool refused = pieces.error == "damaged .bwrun: " + zstd && pieces.messages <= whole.messages;
  FUZZ_CHECK(whole.result != bellwether::RecordingReader::Result::kEnd || whole == pieces || refused);
  return 0;
}
