#include "server/store/run_windows.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/store/byte_io.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr uint8_t kStateVersion = 1;
constexpr uint32_t kComplete = 1;

}  // namespace

void EncodeMeta(const StepSample& sample, float* cells) {
  const auto time = static_cast<uint64_t>(sample.time_unix_ns);
  cells[0] = std::bit_cast<float>(static_cast<uint32_t>(time));
  cells[1] = std::bit_cast<float>(static_cast<uint32_t>(time >> 32));
  cells[2] = std::bit_cast<float>(sample.ranks);
  cells[3] = std::bit_cast<float>(sample.complete ? kComplete : 0);
}

void DecodeMeta(const std::vector<float>& cells, StepSample* sample) {
  const auto word = [&cells](size_t i) { return std::bit_cast<uint32_t>(cells[i]); };
  sample->time_unix_ns = static_cast<int64_t>(uint64_t{word(1)} << 32 | word(0));
  sample->ranks = word(2);
  sample->complete = word(3) == kComplete;
}

absl::Status RunWindows::Append(const StepSample& sample) {
  if (sample.layout() != layout_) return absl::FailedPreconditionError("the sample's layout is not the run's");
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
  {
    absl::MutexLock lock(&mutex_);
    any_ = true;
    attempt_ = sample.attempt;
    last_step_ = sample.step;
    float meta[kMetaCells];
    EncodeMeta(sample, meta);
    AppendRow(kMetaSignal, sample.step, meta);
    for (const SignalId signal : sample.signals()) {
      AppendRow(static_cast<uint8_t>(signal), sample.step, sample.matrix(signal));
    }
  }
  for (auto& [signal, open] : open_) {
    if (open.steps.size() >= window_steps_) Seal(signal, &open);
  }
  return absl::OkStatus();
}

void RunWindows::AppendRow(uint8_t signal, int64_t step, std::span<const float> row) {
  Open& open = open_[signal];
  if (open.values.empty()) {
    open.cells = row.size();
    open.values.resize(window_steps_ * row.size());
  }
  // memcpy, not a float copy: a signalling NaN must keep its bits.
  std::memcpy(open.values.data() + open.steps.size() * open.cells, row.data(), row.size_bytes());
  open.steps.push_back(step);
}

// Encodes without the lock: nobody but this thread changes an open window.
void RunWindows::Seal(uint8_t signal, Open* open) {
  if (open->steps.empty()) return;
  std::vector<std::shared_ptr<const std::string>> parts;
  for (size_t cell = 0; cell < open->cells; cell += kPartCells) {
    parts.push_back(std::make_shared<const std::string>(EncodeChunk({.steps = open->steps,
                                                                     .values = open->values.data() + cell,
                                                                     .cells = std::min(kPartCells, open->cells - cell),
                                                                     .stride = open->cells,
                                                                     .zstd_level = zstd_level_})));
  }
  absl::MutexLock lock(&mutex_);
  for (size_t part = 0; part < parts.size(); ++part) {
    sealed_.push_back({.number = next_number_++,
                       .signal = signal,
                       .part = static_cast<uint32_t>(part),
                       .attempt = attempt_,
                       .first_step = open->steps.front(),
                       .bytes = std::move(parts[part])});
  }
  open->steps.clear();
}

void RunWindows::SealAll() {
  for (auto& [signal, open] : open_) Seal(signal, &open);
}

std::vector<RunWindows::Sealed> RunWindows::TakeSealed() const {
  absl::MutexLock lock(&mutex_);
  return {sealed_.begin(), sealed_.end()};
}

void RunWindows::Forget(uint64_t number_max) {
  absl::MutexLock lock(&mutex_);
  while (!sealed_.empty() && sealed_.front().number <= number_max) sealed_.pop_front();
}

std::string RunWindows::Save() const {
  std::string state;
  ByteWriter out(&state);
  absl::MutexLock lock(&mutex_);
  out.Put(kStateVersion);
  out.Put(layout_.layers);
  out.Put(layout_.heads);
  out.Put(layout_.kv_heads);
  out.Put(any_);
  out.Put(attempt_);
  out.Put(last_step_);
  out.PutVarint(open_.size());
  for (const auto& [signal, open] : open_) {
    out.Put(signal);
    out.PutVarint(open.cells);
    out.PutVarint(open.steps.size());
    for (const int64_t step : open.steps) out.Put(step);
    state.append(reinterpret_cast<const char*>(open.values.data()), open.steps.size() * open.cells * sizeof(float));
  }
  return state;
}

absl::Status RunWindows::Restore(std::string_view state) {
  ByteReader in(state);
  const absl::Status damaged = absl::DataLossError("saved windows: damaged, or of another version");
  if (in.Get<uint8_t>() != kStateVersion) return damaged;
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
  for (size_t n = in.GetCount(3); n > 0; --n) {
    const auto signal = in.Get<uint8_t>();
    const SignalInfo* const info = FindSignal(static_cast<SignalId>(signal));
    if (signal != kMetaSignal && (info == nullptr || info->derived)) return damaged;
    const size_t cells_expected =
        signal == kMetaSignal ? kMetaCells : static_cast<size_t>(ShapeOf(*info, layout_).size());
    const size_t cells = in.GetVarint();
    const size_t steps = in.GetVarint();
    if (!in.ok() || cells != cells_expected || steps > kChunkStepsMax) return damaged;
    Open& open = open_[signal];
    open.cells = cells;
    for (size_t i = 0; i < steps; ++i) open.steps.push_back(in.Get<int64_t>());
    if (!std::is_sorted(open.steps.begin(), open.steps.end())) return damaged;
    const std::string_view values = in.GetRaw(steps * cells * sizeof(float));
    if (!in.ok()) return damaged;
    // A server started with a smaller window seals it at the next append.
    open.values.resize(std::max(window_steps_, steps + 1) * cells);
    std::memcpy(open.values.data(), values.data(), values.size());
  }
  return in.done() ? absl::OkStatus() : damaged;
}

void RunWindows::Collect(uint8_t signal, uint32_t part_begin, uint32_t part_end,
                         std::vector<MemoryWindow>* windows) const {
  absl::MutexLock lock(&mutex_);
  for (const Sealed& sealed : sealed_) {
    if (sealed.signal != signal || sealed.part < part_begin || sealed.part >= part_end) continue;
    windows->push_back({signal, sealed.part, sealed.attempt, sealed.bytes, nullptr});
  }
  const auto found = open_.find(signal);
  if (found == open_.end() || found->second.steps.empty()) return;
  const Open& open = found->second;
  for (uint32_t part = part_begin; part < part_end && part * kPartCells < open.cells; ++part) {
    auto chunk = std::make_shared<Chunk>();
    chunk->steps = open.steps;
    chunk->cells = std::min(kPartCells, open.cells - part * kPartCells);
    chunk->values.resize(chunk->steps.size() * chunk->cells);
    for (size_t t = 0; t < chunk->steps.size(); ++t) {
      std::memcpy(chunk->values.data() + t * chunk->cells, open.values.data() + t * open.cells + part * kPartCells,
                  chunk->cells * sizeof(float));
    }
    windows->push_back({signal, part, attempt_, nullptr, std::move(chunk)});
  }
}

std::set<uint8_t> RunWindows::Signals() const {
  absl::MutexLock lock(&mutex_);
  std::set<uint8_t> signals;
  for (const auto& [signal, open] : open_) signals.insert(signal);
  for (const Sealed& sealed : sealed_) signals.insert(sealed.signal);
  return signals;
}

int64_t RunWindows::memory_bytes() const {
  absl::MutexLock lock(&mutex_);
  size_t bytes = sizeof(*this);
  for (const auto& [signal, open] : open_) bytes += open.values.capacity() * sizeof(float) + open.steps.capacity() * 8;
  for (const Sealed& sealed : sealed_) bytes += sizeof(sealed) + sealed.bytes->size();
  return static_cast<int64_t>(bytes);
}

}  // namespace bellwether::server
