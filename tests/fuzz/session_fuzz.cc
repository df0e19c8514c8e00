// A whole stream of messages, a Hello first or not: each is refused or taken, and
// the steps that come of those that are taken rise within an attempt.
//
// The input is messages, each behind a length of two bytes and a rank of one.

#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "server/ingest/decode.h"
#include "server/ingest/own_values.h"
#include "server/ingest/rank_merge.h"
#include "server/ingest/row_maps.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace bellwether::server;
  bellwether::FuzzInput input(data, size);
  std::optional<Layout> layout;
  std::optional<RankMerge> merge;
  RowMaps maps;
  OwnRows own;
  RunRows rows;
  const auto grow = [&](const Layout& more) {
    layout->GrowTo(more);
    merge->Grow(*layout);
  };
  std::pair<uint32_t, int64_t> closed{0, -1};
  const RankMerge::Sink sink = [&](const StepSample& sample) {
    FUZZ_CHECK(std::make_pair(sample.attempt, sample.step) > closed);
    closed = {sample.attempt, sample.step};
  };
  DecodeLimits limits;
  limits.layers_max = 8;  // So that no input is slow.
  limits.heads_max = 16;
  limits.world_max = 8;
  Lsn lsn = 0;
  while (!input.rest().empty()) {
    const size_t length = input.Take<uint16_t>() % 4096;
    const uint32_t rank = input.Take<uint8_t>() % 8;
    bellwether::v1::ClientMessage message;
    const std::string_view bytes = input.TakeBytes(length);
    if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) continue;
    const auto decoded = Decode(message, layout ? &*layout : nullptr, limits);
    if (!decoded.ok()) continue;
    if (const auto* hello = std::get_if<HelloMessage>(&decoded->body)) {
      FUZZ_CHECK(hello->rank < hello->run.world && hello->run.reporters <= hello->run.world);
      if (!layout) {
        layout = hello->run.layout;
        merge.emplace(*layout, hello->run.reporters);
      }
      grow(hello->run.layout);
      merge->Join(hello->rank, hello->run.attempt, hello->run.reporters);
      continue;
    }
    FUZZ_CHECK(layout.has_value());  // Nothing else passes before a Hello.
    if (const auto* frame = std::get_if<RankFrame>(&decoded->body)) {
      uint64_t left_out = 0;
      std::optional<RunRows> grown;
      std::vector<OwnRefusal> refused;
      const RankFrame known = own.Translate(maps.Translate(rank, *frame, *layout, &left_out), rows, &grown, &refused);
      if (grown.has_value()) {
        rows = *std::move(grown);
        grow({.own = rows.own.size()});
      }
      merge->Add(rank, known, ++lsn, sink);
    } else if (const auto* names = std::get_if<NamesMessage>(&decoded->body)) {
      maps.Add(rank, *names, &rows);
      grow({.tensors = rows.tensors.size(), .modules = rows.modules.size()});
    } else if (std::holds_alternative<ByeMessage>(decoded->body)) {
      merge->SetGone(rank, sink);
    }
  }
  return 0;
}
