#include "server/offline/recorded_run.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <system_error>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bellwether/recording.h"
#include "server/detect/gram_assembler.h"
#include "server/detect/spectra.h"
#include "server/ingest/decode.h"
#include "server/ingest/own_values.h"
#include "server/ingest/rank_merge.h"
#include "server/ingest/row_maps.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// What was once taken is read again, whatever is refused by now.
constexpr DecodeLimits kTaken = {.own_low_at_most_high = false};

class RunReader {
 public:
  explicit RunReader(RunListener* listener)
      : listener_(listener), sink_([this](const StepSample& sample) {
          grams_.Close(sample.attempt, sample.step);
          listener_->OnSample(sample);
        }) {}

  absl::Status Take(const v1::RecordedMessage& recorded) {
    if (recorded.message().has_heartbeat()) return absl::OkStatus();
    const bool is_hello = recorded.message().has_hello();
    v1::ClientMessage message = recorded.message();
    if (is_hello || message.has_bye()) message.set_seq(0);
    BW_ASSIGN_OR_RETURN(const IngestMessage plain, Decode(message, is_hello || !layout_ ? nullptr : &*layout_, kTaken));
    if (const auto* hello = std::get_if<HelloMessage>(&plain.body)) {
      if (!layout_) {
        layout_ = hello->run.layout;
        merge_ = std::make_unique<RankMerge>(*layout_, hello->run.reporters);
      }
      Grow(hello->run.layout);
      merge_->Join(recorded.rank(), hello->run.attempt, hello->run.reporters);
      listener_->OnHello(hello->run);
    } else if (const auto* frame = std::get_if<RankFrame>(&plain.body)) {
      const RankFrame known = row_maps_.Translate(recorded.rank(), *frame, *layout_, &values_without_row_);
      TakeFrame(recorded.rank(), known);
    } else if (const auto* names = std::get_if<NamesMessage>(&plain.body)) {
      TakeNames(recorded.rank(), *names);
    } else if (const auto* gram = std::get_if<ShippedGram>(&plain.body)) {
      TakeGram(*gram);
    } else if (const auto* event = std::get_if<RunEvent>(&plain.body)) {
      listener_->OnEvent(*event);
    } else if (std::get_if<ByeMessage>(&plain.body) != nullptr) {
      merge_->SetGone(recorded.rank(), sink_);
    }
    return absl::OkStatus();
  }

 private:
  void Grow(const Layout& layout) {
    layout_->GrowTo(layout);
    merge_->Grow(*layout_);
  }

  void TakeNames(uint32_t rank, const NamesMessage& names) {
    row_maps_.Add(rank, names, &rows_);
    Grow({.tensors = rows_.tensors.size(), .modules = rows_.modules.size()});
    listener_->OnRows(rows_);
  }

  void TakeFrame(uint32_t rank, const RankFrame& frame) {
    if (frame.own.empty()) {
      merge_->Add(rank, frame, ++frames_, sink_);
      return;
    }
    std::optional<RunRows> grown;
    std::vector<OwnRefusal> refused;
    const RankFrame known = own_rows_.Translate(frame, rows_, &grown, &refused);
    if (grown.has_value()) {
      rows_ = *std::move(grown);
      Grow({.own = rows_.own.size()});
      listener_->OnRows(rows_);
    }
    merge_->Add(rank, known, ++frames_, sink_);
  }

  // As a live run does, but at once: there is nobody to keep waiting.
  void TakeGram(const ShippedGram& gram) {
    GramTask task;
    if (merge_ == nullptr || !merge_->Hold(gram.attempt, gram.step, ++frames_, 0) ||
        grams_.Take(gram, &task) != GramAssembler::Outcome::kTask) {
      return;
    }
    std::vector<RankMerge::Cell> cells;
    for (const GramAnswer& answer : SolveGrams({&task, 1}, CpuSpectraBank())) {
      for (size_t i = 0; i < answer.count; ++i) {
        cells.push_back({answer.values[i].signal, gram.where.layer, gram.where.head, answer.values[i].value});
      }
    }
    (void)merge_->Hold(gram.attempt, gram.step, frames_, 1);
    (void)merge_->Fill(gram.attempt, gram.step, cells, sink_);
  }

  RunListener* const listener_;
  const RankMerge::Sink sink_;
  std::optional<Layout> layout_;
  std::unique_ptr<RankMerge> merge_;
  RowMaps row_maps_;
  OwnRows own_rows_;
  RunRows rows_;
  uint64_t values_without_row_ = 0;
  GramAssembler grams_{GramAssembler::Options()};
  Lsn frames_ = 0;
};

}  // namespace

absl::Status WalkRecordedRun(const std::string& path, RunListener* listener) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": is a directory, holds no .bwrun"));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be read: ", std::strerror(errno)));
  RecordingReader recording;
  RunReader reader(listener);
  v1::RecordedMessage recorded;
  std::vector<char> piece(256 << 10);
  for (;;) {
    switch (recording.Next(&recorded)) {
      case RecordingReader::Result::kMessage:
        if (const absl::Status taken = reader.Take(recorded); !taken.ok()) {
          return absl::InvalidArgumentError(absl::StrCat(path, ": ", taken.message()));
        }
        break;
      case RecordingReader::Result::kEnd:
        return absl::OkStatus();
      case RecordingReader::Result::kError:
        return absl::InvalidArgumentError(absl::StrCat(path, ": ", recording.error()));
      case RecordingReader::Result::kNeedMore:
        file.read(piece.data(), static_cast<std::streamsize>(piece.size()));
        if (file.gcount() == 0) return absl::InvalidArgumentError(absl::StrCat(path, ": ends too early"));
        recording.Feed({piece.data(), static_cast<size_t>(file.gcount())});
    }
  }
}

}  // namespace bellwether::server
