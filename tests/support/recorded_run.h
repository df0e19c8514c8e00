// recorded_run.h: reads a .bwrun file of one rank into what a judge sees.
//
// For tests and the tables of the documents: the whole file in memory, frames
// of one step joined, values placed as the wire says, no limits checked.

#ifndef BELLWETHER_TESTS_SUPPORT_RECORDED_RUN_H_
#define BELLWETHER_TESTS_SUPPORT_RECORDED_RUN_H_

#include <algorithm>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "bellwether/recording.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

// A sample or an event, in the order in which the rank sent them.
struct RecordedItem {
  bool is_event = false;
  RunEvent event;
  StepSample sample;
};

struct RecordedRun {
  RunDescription description;
  std::vector<RecordedItem> items;
};

inline RunDescription DescriptionOf(const v1::Hello& hello) {
  const v1::RunDescription& run = hello.run();
  RunDescription out;
  out.name = run.name();
  out.attempt = run.attempt();
  out.world = run.world();
  out.reporters = run.reporters();
  out.layout = {.layers = static_cast<int32_t>(run.layout().layers()),
                .heads = static_cast<int32_t>(run.layout().heads()),
                .kv_heads = static_cast<int32_t>(run.layout().kv_heads()),
                .head_dim = static_cast<int32_t>(run.layout().head_dim()),
                .seq_len = static_cast<int32_t>(run.layout().seq_len())};
  out.attention = {.kernel = run.attention().kernel(),
                   .score_dtype = run.attention().score_dtype(),
                   .centred = run.attention().centred(),
                   .qk_norm = run.attention().qk_norm(),
                   .causal = run.attention().causal(),
                   .softcap = run.attention().softcap(),
                   .window = static_cast<int32_t>(run.attention().window())};
  out.weight_decay = run.weight_decay();
  return out;
}

// Nothing if the file cannot be read to its end.
inline std::optional<RecordedRun> ReadRecordedRun(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  RecordingReader reader;
  reader.Feed(bytes);
  RecordedRun run;
  v1::RecordedMessage message;
  for (;;) {
    const RecordingReader::Result result = reader.Next(&message);
    if (result == RecordingReader::Result::kEnd) return run;
    if (result != RecordingReader::Result::kMessage) return std::nullopt;
    const v1::ClientMessage& body = message.message();
    if (body.has_hello()) {
      run.description = DescriptionOf(body.hello());
    } else if (body.has_event()) {
      RecordedItem& item = run.items.emplace_back();
      item.is_event = true;
      item.event = {.attempt = body.event().attempt(),
                    .step = body.event().step(),
                    .kind = static_cast<EventKind>(body.event().kind()),
                    .value = body.event().value(),
                    .text = body.event().text()};
    } else if (body.has_frame()) {
      const v1::Frame& frame = body.frame();
      const bool joins = !run.items.empty() && !run.items.back().is_event &&
                         run.items.back().sample.step == frame.step() && frame.part() > 0;
      StepSample& sample = joins ? run.items.back().sample : run.items.emplace_back().sample;
      if (!joins) {
        sample.Reset(run.description.layout);
        sample.attempt = frame.attempt();
        sample.step = frame.step();
        sample.ranks = 1;
      }
      for (const v1::Block& block : frame.blocks()) {
        const auto id = static_cast<SignalId>(block.signal());
        const auto to = sample.Add(id);
        const MatrixShape shape = ShapeOf(*FindSignal(id), sample.layout());
        int next = 0;
        for (uint32_t layer = 0; layer < block.layer_count(); ++layer) {
          for (uint32_t head = 0; head < block.head_count(); ++head) {
            to[(block.layer_begin() + layer) * static_cast<size_t>(shape.heads) + block.head_begin() + head] =
                block.values(next++);
          }
        }
      }
    }
  }
}

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_RECORDED_RUN_H_
