// Any bytes that a client may send are a message within all limits, or a refusal
// that says why; what is taken goes into the log and comes back the same.

#include <string>
#include <variant>

#include "server/ingest/decode.h"
#include "server/ingest/log_records.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace bellwether::server;
  static const Layout kLayout{4, 8, 2, 64, 1024};
  bellwether::v1::ClientMessage message;
  if (!message.ParseFromArray(data, static_cast<int>(size))) return 0;
  for (const Layout* layout : {static_cast<const Layout*>(nullptr), &kLayout}) {
    const auto decoded = Decode(message, layout, {});
    if (!decoded.ok()) {
      FUZZ_CHECK(!decoded.status().message().empty());
      continue;
    }
    if (const auto* frame = std::get_if<RankFrame>(&decoded->body)) {
      for (const auto& block : frame->blocks) {
        FUZZ_CHECK(block.layer_begin >= 0 && block.head_begin >= 0);
      }
    }
    WalRecord record;
    record.kind = message.has_hello() ? WalKind::kHello : WalKind::kMessage;
    record.payload = message.SerializeAsString();
    if (message.seq() > 0 || message.has_hello()) FUZZ_CHECK(DecodeRecord(record, layout, {}).ok());
  }
  return 0;
}
