// A recording is one in one piece or in many, with the same messages.  Of what is
// damaged zstd gives up earlier where it has it all at once, and takes some in pieces
// that it refuses in one (corpus/recording/size_that_lies: fewer bytes than its frame
// says).

#include <algorithm>
#include <string>

#include "bellwether/recording.h"
#include "tests/fuzz/fuzz.h"

namespace {

// Messages read, and how it ended.
std::pair<int, bellwether::RecordingReader::Result> Read(std::string_view bytes, size_t piece) {
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
      return {messages, result};
    }
    if (messages > 10'000) return {messages, bellwether::RecordingReader::Result::kNeedMore};
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto whole = Read(bytes, std::max<size_t>(size, 1));
  const auto pieces = Read(bytes, 7);
  FUZZ_CHECK(whole.second != bellwether::RecordingReader::Result::kEnd || whole == pieces);
  return 0;
}
