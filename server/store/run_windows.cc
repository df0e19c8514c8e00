#include "server/store/run_windows.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/store/chunk_rows.h"
#include "server/util/byte_io.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr uint8_t kWindowsVersion = 2;
constexpr uint32_t kComplete = 1;
// Nanoseconds of a time would be more bytes than many a value.
constexpr int64_t kTimeUnitNanos = 1000;

}  // namespace

void EncodeMeta(const StepSample& sample, float* cells) {
  const auto time = static_cast<uint64_t>(sample.time_unix_ns / kTimeUnitNanos);
  cells[0] = std::bit_cast<float>(static_cast<uint32_t>(time));
  cells[1] = std::bit_cast<float>(static_cast<uint32_t>(time >> 32));
  cells[2] = std::bit_cast<float>(sample.ranks);
  cells[3] = std::bit_cast<float>(sample.complete ? kComplete : 0);
}

void DecodeMeta(const std::vector<float>& cells, StepSample* sample) {
  const auto word = [&cells](size_t i) { return std::bit_cast<uint32_t>(cells[i]); };
  sample->time_unix_ns = static_cast<int64_t>(uint64_t{word(1)} << 32 | word(0)) * kTimeUnitNanos;
  sample->ranks = word(2);
  sample->complete = word(3) == kComplete;
}

bool MemoryBudget::Take(int64_t bytes) {
  int64_t left = left_.load();
  while (left >= bytes) {
    if (left_.compare_exchange_weak(left, left - bytes)) return true;
  }
  return false;
}

RunWindows::RunWindows(const Layout& layout, const Options& options, MemoryBudget* budget)
    : layout_(layout), options_(options), budget_(budget), derived_(layout) {}

RunWindows::~RunWindows() { budget_->Return(budget_taken_); }

absl::Status RunWindows::Append(const StepSample& sample) {
  Layout grown = layout_;
  grown.GrowTo(sample.layout());
  if (sample.layout() != grown) return absl::FailedPreconditionError("the sample's layout is not the run's");
  bool new_attempt = false;
  {
    absl::MutexLock lock(&mutex_);
    if (any_ && sample.attempt < attempt_) {
      return absl::FailedPreconditionError(
          absl::StrCat("step ", sample.step, " of attempt ", sample.attempt, ": attempt ", attempt_, " has begun"));
    }
    new_attempt = any_ && sample.attempt > attempt_;
    if (any_ && !new_attempt && sample.step <= last_step_) {
      return absl::FailedPreconditionError(
          absl::StrCat("step ", sample.step, ": the attempt is at step ", last_step_, " already"));
    }
  }
  if (new_attempt) SealAll();
  if (grown != layout_) Grow(grown);
  std::vector<DerivedSpans::Finished> finished;
  {
    absl::MutexLock lock(&mutex_);
    any_ = true;
    attempt_ = sample.attempt;
    last_step_ = sample.step;
    float meta[kMetaCells];
    EncodeMeta(sample, meta);
    AppendRow(kMetaSignal, sample.step, meta);
    for (const SignalId signal : sample.signals()) {
      AppendRow(static_cast<uint16_t>(signal), sample.step, sample.matrix(signal));
    }
    derived_.Add(sample, &finished);
  }
  for (auto& [signal, open] : open_) {
    if (open.steps.size() >= open.steps_max) Seal(signal, &open);
  }
  PushDerived(finished);
  return absl::OkStatus();
}

void RunWindows::Grow(const Layout& layout) {
  SealAll();
  layout_ = layout;
  absl::MutexLock lock(&mutex_);
  derived_.Grow(layout);
  std::erase_if(open_, [this](const auto& window) {
    mutex_.AssertHeld();
    const auto& [signal, open] = window;
    const SignalInfo* const info = FindSignal(static_cast<SignalId>(signal));
    if (info == nullptr || static_cast<size_t>(ShapeOf(*info, layout_).size()) == open.cells) return false;
    if (open.becomes_chunk) {
      const auto bytes = static_cast<int64_t>(open.steps_full * open.cells * sizeof(float));
      budget_->Return(bytes);
      budget_taken_ -= bytes;
    }
    return true;
  });
}

RunWindows::Open* RunWindows::FindOrOpen(uint16_t signal, size_t cells) {
  Open& open = open_[signal];
  if (open.cells > 0) return &open;
  open.cells = cells;
  open.steps_full = StepsForCells(options_.chunk_steps, cells);
  const auto bytes = static_cast<int64_t>(open.steps_full * cells * sizeof(float));
  open.becomes_chunk = budget_->Take(bytes);
  if (open.becomes_chunk) {
    budget_taken_ += bytes;
  } else {
    open.steps_full = StepsForCells(options_.window_steps, cells);
  }
  open.steps_max = FirstSteps(signal, open);
  open.values.resize(open.steps_full * cells);
  return &open;
}

size_t RunWindows::FirstSteps(uint16_t signal, const Open& open) const {
  if (!open.becomes_chunk || open.cells < kGroupCells) return open.steps_full;
  constexpr uint64_t kOddFraction = 0x9e3779b97f4a7c15u;  // Of 2^64: its multiples lie far apart.
  const uint64_t place = (options_.stagger + signal) * kOddFraction >> 32;
  return open.steps_full - static_cast<size_t>(place * open.steps_full >> 32);
}

void RunWindows::AppendRow(uint16_t signal, int64_t step, std::span<const float> row) {
  Open& open = *FindOrOpen(signal, row.size());
  // memcpy, not a float copy: a signalling NaN must keep its bits.
  std::memcpy(open.values.data() + open.steps.size() * open.cells, row.data(), row.size_bytes());
  open.steps.push_back(step);
}

std::vector<std::string> RunWindows::EncodeParts(const Open& open, size_t first_row) const {
  std::vector<std::string> parts;
  for (size_t cell = 0; cell < open.cells; cell += kPartCells) {
    parts.push_back(EncodeChunk({.steps = std::span(open.steps).subspan(first_row),
                                 .values = open.values.data() + first_row * open.cells + cell,
                                 .cells = std::min(kPartCells, open.cells - cell),
                                 .stride = open.cells,
                                 .zstd_level = options_.zstd_level}));
  }
  return parts;
}

// Encodes without the lock: nobody but this thread changes an open window.
void RunWindows::Seal(uint16_t signal, Open* open) {
  if (open->steps.empty()) return;
  auto sealed = std::make_shared<Sealed>();
  sealed->signal = signal;
  sealed->first_step = open->steps.front();
  sealed->is_chunk = open->becomes_chunk;
  if (open->becomes_chunk) {
    ChunkRows rows = MakeChunkRows(signal, {.steps = open->steps,
                                            .values = open->values.data(),
                                            .cells = open->cells,
                                            .stride = open->cells,
                                            .zstd_level = options_.zstd_level});
    sealed->rows = std::move(rows.chunks);
    sealed->summaries = std::move(rows.summaries);
  } else {
    for (std::string& part : EncodeParts(*open, 0)) {
      sealed->rows.push_back(std::make_shared<const std::string>(std::move(part)));
    }
  }
  sealed->superseded = std::move(open->superseded);
  absl::MutexLock lock(&mutex_);
  sealed->attempt = attempt_;
  sealed->number = next_number_++;
  sealed_.push_back(std::move(sealed));
  open->steps.clear();
  open->steps_max = open->steps_full;
  open->stored = 0;
  open->superseded.clear();
}

void RunWindows::SealAll() {
  for (auto& [signal, open] : open_) {
    Seal(signal, &open);
    open.steps_max = FirstSteps(signal, open);
  }
  std::vector<DerivedSpans::Finished> finished;
  {
    absl::MutexLock lock(&mutex_);
    derived_.FinishAll(&finished);
  }
  PushDerived(finished);
}

void RunWindows::PushDerived(const std::vector<DerivedSpans::Finished>& finished) {
  for (const auto& [signal, span] : finished) {
    auto sealed = std::make_shared<Sealed>();
    sealed->signal = static_cast<uint16_t>(signal);
    sealed->first_step = span.first_step;
    sealed->summaries = MakeSummaryRows({&span, 1}, span.series.size());
    absl::MutexLock lock(&mutex_);
    sealed->attempt = attempt_;
    sealed->number = next_number_++;
    sealed_.push_back(std::move(sealed));
  }
}

std::vector<RunWindows::Unfinished> RunWindows::TakeUnfinished() {
  std::vector<Unfinished> unfinished;
  taken_.clear();
  for (auto& [signal, open] : open_) {
    if (!open.becomes_chunk) {
      Seal(signal, &open);
    } else if (open.stored < open.steps.size()) {
      Unfinished rows{.signal = signal, .first_step = open.steps[open.stored], .parts = EncodeParts(open, open.stored)};
      absl::MutexLock lock(&mutex_);
      rows.attempt = attempt_;
      open.stored = open.steps.size();
      std::erase_if(open.superseded, [&](const Superseded& row) { return row.first_step == rows.first_step; });
      for (size_t part = 0; part < rows.parts.size(); ++part) {
        open.superseded.push_back({static_cast<uint32_t>(part), rows.first_step, rows.parts[part].size()});
      }
      taken_.emplace_back(signal, rows.first_step);
      unfinished.push_back(std::move(rows));
    }
  }
  return unfinished;
}

void RunWindows::NotStored() {
  for (const auto& [signal, first_step] : taken_) {
    Open& open = open_[signal];
    const auto at = std::find(open.steps.begin(), open.steps.end(), first_step);
    if (at == open.steps.end()) continue;  // Sealed meanwhile: it is all in there.
    // They count as superseded all the same: where the store did not answer they may be there.
    open.stored = std::min(open.stored, static_cast<size_t>(at - open.steps.begin()));
  }
  taken_.clear();
}

std::vector<std::shared_ptr<const RunWindows::Sealed>> RunWindows::TakeSealed() const {
  absl::MutexLock lock(&mutex_);
  return {sealed_.begin(), sealed_.end()};
}

void RunWindows::Forget(uint64_t number_max) {
  absl::MutexLock lock(&mutex_);
  while (!sealed_.empty() && sealed_.front()->number <= number_max) sealed_.pop_front();
}

std::string RunWindows::Save() const {
  std::string state;
  ByteWriter out(&state);
  absl::MutexLock lock(&mutex_);
  out.Put(kWindowsVersion);
  out.Put(layout_.layers);
  out.Put(layout_.heads);
  out.Put(layout_.kv_heads);
  out.Put(any_);
  out.Put(attempt_);
  out.Put(last_step_);
  derived_.Save(&out);
  return state;
}

absl::Status RunWindows::Restore(std::string_view state) {
  ByteReader in(state);
  const absl::Status damaged = absl::DataLossError("saved windows: damaged, or of another version");
  if (in.Get<uint8_t>() != kWindowsVersion) return damaged;
  const auto layers = in.Get<int32_t>();
  const auto heads = in.Get<int32_t>();
  const auto kv_heads = in.Get<int32_t>();
  if (in.ok() && (layers != layout_.layers || heads != layout_.heads || kv_heads != layout_.kv_heads)) {
    return absl::FailedPreconditionError("saved windows: of another layout");
  }
  absl::MutexLock lock(&mutex_);
  any_ = in.Get<bool>();
  attempt_ = in.Get<uint32_t>();
  last_step_ = in.Get<int64_t>();
  return derived_.Restore(&in) && in.done() ? absl::OkStatus() : damaged;
}

absl::Status RunWindows::RestoreUnfinished(const Unfinished& stored) {
  const absl::Status damaged = absl::DataLossError("unfinished chunk: damaged, or not of the saved state");
  const SignalInfo* const info = FindSignal(static_cast<SignalId>(stored.signal));
  if (stored.signal != kMetaSignal && (info == nullptr || info->derived)) return damaged;
  const size_t cells = stored.signal == kMetaSignal ? kMetaCells : static_cast<size_t>(ShapeOf(*info, layout_).size());
  if (stored.parts.size() != (cells + kPartCells - 1) / kPartCells) return damaged;
  std::vector<Chunk> parts(stored.parts.size());
  std::vector<Superseded> rows;
  for (size_t i = 0; i < parts.size(); ++i) {
    BW_RETURN_IF_ERROR(DecodeChunk(stored.parts[i], &parts[i]));
    if (parts[i].cells != std::min(kPartCells, cells - i * kPartCells) || parts[i].steps != parts[0].steps)
      return damaged;
    rows.push_back({static_cast<uint32_t>(i), stored.first_step, stored.parts[i].size()});
  }
  const std::vector<int64_t>& steps = parts[0].steps;
  absl::MutexLock lock(&mutex_);
  if (!any_ || stored.attempt != attempt_ || steps.front() != stored.first_step || steps.back() > last_step_)
    return damaged;
  Open& open = *FindOrOpen(stored.signal, cells);
  if (!open.becomes_chunk) {
    // Too many runs are live now: the rows go on as a window.
    auto window = std::make_shared<Sealed>();
    window->number = next_number_++;
    window->signal = stored.signal;
    window->attempt = stored.attempt;
    window->first_step = stored.first_step;
    for (const std::string& part : stored.parts) window->rows.push_back(std::make_shared<const std::string>(part));
    window->superseded = std::move(rows);
    sealed_.push_back(std::move(window));
    return absl::OkStatus();
  }
  if (!open.steps.empty() && steps.front() <= open.steps.back()) return damaged;
  const size_t first_row = open.steps.size();
  open.steps.insert(open.steps.end(), steps.begin(), steps.end());
  open.superseded.insert(open.superseded.end(), rows.begin(), rows.end());
  open.stored = open.steps.size();
  open.steps_max = open.steps_full;
  // A server started with smaller chunks seals it at the next append.
  open.values.resize(std::max(open.steps_full, open.steps.size() + 1) * cells);
  for (size_t i = 0; i < parts.size(); ++i) {
    for (size_t t = 0; t < steps.size(); ++t) {
      std::memcpy(open.values.data() + (first_row + t) * cells + i * kPartCells,
                  parts[i].values.data() + t * parts[i].cells, parts[i].cells * sizeof(float));
    }
  }
  return absl::OkStatus();
}

void RunWindows::Collect(uint16_t signal, size_t cell_begin, size_t cell_end, std::vector<MemoryBlock>* blocks) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& sealed : sealed_) {
    if (sealed->signal != signal) continue;
    const bool has_groups = sealed->is_chunk || sealed->rows.empty();
    const size_t cells_each = has_groups ? kGroupCells : kPartCells;
    const size_t count = std::max(sealed->rows.size(), sealed->summaries.size());
    for (size_t i = cell_begin / cells_each; i < count && i * cells_each < cell_end; ++i) {
      MemoryBlock& block = blocks->emplace_back();
      block.signal = signal;
      block.attempt = sealed->attempt;
      block.first_cell = i * cells_each;
      if (i < sealed->rows.size()) block.bytes = sealed->rows[i];
      // Shares the ownership of all that was sealed together.
      if (i < sealed->summaries.size()) block.summaries = {sealed, &sealed->summaries[i]};
    }
  }
  const auto found = open_.find(signal);
  if (found == open_.end()) return;
  const Open& open = found->second;
  cell_end = std::min(cell_end, open.cells);
  if (open.steps.empty() || cell_begin >= cell_end) return;
  auto chunk = std::make_shared<Chunk>();
  chunk->steps = open.steps;
  chunk->cells = cell_end - cell_begin;
  chunk->values.resize(chunk->steps.size() * chunk->cells);
  for (size_t t = 0; t < chunk->steps.size(); ++t) {
    std::memcpy(chunk->values.data() + t * chunk->cells, open.values.data() + t * open.cells + cell_begin,
                chunk->cells * sizeof(float));
  }
  blocks->push_back({signal, attempt_, cell_begin, nullptr, std::move(chunk), nullptr});
}

int64_t RunWindows::memory_bytes() const {
  absl::MutexLock lock(&mutex_);
  size_t bytes = sizeof(*this) + derived_.memory_bytes();
  for (const auto& [signal, open] : open_) bytes += open.values.capacity() * sizeof(float) + open.steps.capacity() * 8;
  for (const auto& sealed : sealed_) {
    bytes += sizeof(*sealed);
    for (const auto& row : sealed->rows) bytes += row->size();
    for (const std::string& row : sealed->summaries) bytes += row.size();
  }
  return static_cast<int64_t>(bytes);
}

}  // namespace bellwether::server
