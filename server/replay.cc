#include "server/replay.h"

#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bellwether/recording.h"
#include "server/detect/run_judge.h"
#include "server/ingest/decode.h"
#include "server/ingest/rank_merge.h"
#include "server/query/json_api.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// A run as replay sees it: what a shard does, without log, store and clock.
class Replayer {
 public:
  explicit Replayer(const ReplayOptions& options) : options_(options) {}

  absl::Status Take(const v1::RecordedMessage& recorded) {
    const bool is_hello = recorded.message().has_hello();
    if (recorded.message().has_heartbeat()) return absl::OkStatus();
    v1::ClientMessage message = recorded.message();
    if (is_hello || message.has_bye()) message.set_seq(0);
    BW_ASSIGN_OR_RETURN(const IngestMessage plain,
                        Decode(message, is_hello ? nullptr : judge_ ? &run_.layout : nullptr, {}));
    std::vector<Transition> transitions;
    const auto sink = [&](const StepSample& sample) {
      if (options_.until_step >= 0 && sample.step > options_.until_step) return;
      judge_->Observe(sample, &transitions);
    };
    if (const auto* hello = std::get_if<HelloMessage>(&plain.body)) {
      if (judge_ == nullptr) {
        run_ = hello->run;
        judge_ = std::make_unique<RunJudge>(options_.judge, run_);
        merge_ = std::make_unique<RankMerge>(run_.layout, run_.reporters);
      }
      judge_->OnHello(hello->run, &transitions);
    } else if (const auto* frame = std::get_if<RankFrame>(&plain.body)) {
      merge_->Add(recorded.rank(), *frame, ++messages_, sink);
    } else if (const auto* event = std::get_if<RunEvent>(&plain.body)) {
      if (options_.until_step < 0 || event->step <= options_.until_step) judge_->OnEvent(*event, &transitions);
    } else if (std::get_if<ByeMessage>(&plain.body) != nullptr) {
      merge_->SetGone(recorded.rank(), sink);
    }
    for (Transition& transition : transitions) Print(&transition);
    return absl::OkStatus();
  }

 private:
  void Print(Transition* transition) const {
    transition->run_name = run_.name;
    if (options_.json) {
      std::puts(TransitionToJson(*transition).c_str());
      return;
    }
    std::printf("step %8ld  %-8s %-8s stage %d  %s\n", static_cast<long>(transition->step),
                transition->state == AlertState::kFiring ? "firing" : "resolved",
                transition->severity == Severity::kCritical  ? "critical"
                : transition->severity == Severity::kWarning ? "warning"
                                                             : "info",
                transition->stage, transition->summary.c_str());
  }

  const ReplayOptions& options_;
  RunDescription run_;
  std::unique_ptr<RunJudge> judge_;
  std::unique_ptr<RankMerge> merge_;
  Lsn messages_ = 0;
};

}  // namespace

absl::Status Replay(const ReplayOptions& options) {
  std::ifstream file(options.file, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(options.file, ": cannot be read"));
  RecordingReader reader;
  Replayer replayer(options);
  v1::RecordedMessage recorded;
  std::vector<char> piece(256 << 10);
  for (;;) {
    switch (reader.Next(&recorded)) {
      case RecordingReader::Result::kMessage:
        BW_RETURN_IF_ERROR(replayer.Take(recorded));
        break;
      case RecordingReader::Result::kEnd:
        return absl::OkStatus();
      case RecordingReader::Result::kError:
        return absl::InvalidArgumentError(absl::StrCat(options.file, ": ", reader.error()));
      case RecordingReader::Result::kNeedMore:
        file.read(piece.data(), static_cast<std::streamsize>(piece.size()));
        if (file.gcount() == 0) return absl::InvalidArgumentError(absl::StrCat(options.file, ": ends too early"));
        reader.Feed({piece.data(), static_cast<size_t>(file.gcount())});
    }
  }
}

}  // namespace bellwether::server
