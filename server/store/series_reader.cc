#include "server/store/series_reader.h"

#include <algorithm>
#include <limits>
#include <set>

#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Steps of some cells, encoded or open.
struct Block {
  uint32_t attempt = 0;
  size_t first_cell = 0;
  std::string_view bytes;
  const Chunk* open = nullptr;

  absl::Status Steps(std::vector<int64_t>* steps) const {
    size_t cells = 0;
    if (open == nullptr) return DecodeChunkShape(bytes, steps, &cells);
    *steps = open->steps;
    return absl::OkStatus();
  }
  // Points `*chunk` at the block, decoded to `*memory` if it must be.
  absl::Status Decode(Chunk* memory, const Chunk** chunk) const {
    *chunk = open != nullptr ? open : memory;
    return open != nullptr ? absl::OkStatus() : DecodeChunk(bytes, memory);
  }
};

bool Wanted(const SeriesRange& range, uint32_t attempt) {
  return range.attempt == SeriesStore::kNewestAttempt || static_cast<uint32_t>(range.attempt) == attempt;
}

bool InSpans(const std::vector<SummarizedSpan>& spans, int64_t step) {
  const auto after = std::upper_bound(spans.begin(), spans.end(), step,
                                      [](int64_t at, const SummarizedSpan& span) { return at < span.first_step; });
  return after != spans.begin() && step <= (after - 1)->last_step;
}

// Whether one of the rising steps is in the range and not in the spans.
bool AnyOutside(const std::vector<SummarizedSpan>& spans, const SeriesRange& range, const std::vector<int64_t>& steps) {
  auto step = std::lower_bound(steps.begin(), steps.end(), range.begin);
  auto span = std::lower_bound(spans.begin(), spans.end(), step == steps.end() ? range.end : *step,
                               [](const SummarizedSpan& a, int64_t at) { return a.last_step < at; });
  for (; step != steps.end() && *step < range.end; ++step) {
    while (span != spans.end() && span->last_step < *step) ++span;
    if (span == spans.end() || *step < span->first_step) return true;
  }
  return false;
}

// One cell of the block, if it has it and a step of it is in the range and not
// in the spans.
absl::Status AddPoints(const Block& block, size_t cell, const SeriesRange& range,
                       const std::vector<SummarizedSpan>& spans, std::vector<SeriesPoint>* points) {
  thread_local std::vector<int64_t> steps;
  thread_local Chunk memory;
  BW_RETURN_IF_ERROR(block.Steps(&steps));
  if (cell < block.first_cell || !AnyOutside(spans, range, steps)) return absl::OkStatus();
  const Chunk* chunk = nullptr;
  BW_RETURN_IF_ERROR(block.Decode(&memory, &chunk));
  const size_t column = cell - block.first_cell;
  if (column >= chunk->cells) return absl::OkStatus();
  const auto from = std::lower_bound(steps.begin(), steps.end(), range.begin) - steps.begin();
  for (auto i = static_cast<size_t>(from); i < steps.size() && steps[i] < range.end; ++i) {
    points->push_back({steps[i], block.attempt, chunk->values[i * chunk->cells + column]});
  }
  return absl::OkStatus();
}

std::string AttemptPrefix(char kind, const SeriesAddress& address, uint32_t attempt) {
  return SeriesRowKey(kind, address, attempt, 0).substr(0, kSeriesPrefixBytes + 4);
}

absl::Status DamagedKey() { return absl::DataLossError("stored series: damaged key"); }

}  // namespace

template <typename Visit>
absl::Status SeriesReader::VisitMemory(uint16_t signal, Visit visit) const {
  for (const MemoryBlock& block : memory_) {
    if (block.signal != signal || (block.bytes == nullptr && block.open == nullptr)) continue;
    const std::string_view bytes = block.bytes != nullptr ? std::string_view(*block.bytes) : std::string_view();
    BW_RETURN_IF_ERROR(visit(Block{block.attempt, block.first_cell, bytes, block.open.get()}));
  }
  return absl::OkStatus();
}

template <typename Visit>
absl::Status SeriesReader::VisitWindows(uint16_t signal, uint32_t part, Visit visit) const {
  absl::Status status;
  const SeriesAddress address{.run = run_, .signal = signal, .index = part};
  BW_RETURN_IF_ERROR(snapshot_.Scan(SeriesPrefix('w', address), {}, [&](std::string_view key, std::string_view value) {
    status =
        key.size() == kSeriesKeyBytes ? visit(Block{KeyAttempt(key), part * kPartCells, value, nullptr}) : DamagedKey();
    return status.ok();
  }));
  return status;
}

absl::StatusOr<std::vector<uint32_t>> SeriesReader::Attempts(uint16_t signal) const {
  std::set<uint32_t> attempts;
  for (const MemoryBlock& block : memory_) {
    if (block.signal == signal) attempts.insert(block.attempt);
  }
  // One jump per attempt, not one step per chunk.
  for (const char prefix : {'w', 's', 'm'}) {
    const SeriesAddress address{.run = run_, .signal = signal, .index = 0};
    std::string from;
    for (bool more = true; more;) {
      more = false;
      BW_RETURN_IF_ERROR(
          snapshot_.Scan(SeriesPrefix(prefix, address), from, [&](std::string_view key, std::string_view) {
            if (key.size() != kSeriesKeyBytes) return false;
            attempts.insert(KeyAttempt(key));
            more = KeyAttempt(key) != std::numeric_limits<uint32_t>::max();
            from = SeriesRowKey(prefix, address, KeyAttempt(key) + 1, std::numeric_limits<int64_t>::min());
            return false;
          }));
    }
  }
  return std::vector<uint32_t>(attempts.begin(), attempts.end());
}

absl::Status SeriesReader::ReadExtent(uint16_t signal, uint32_t attempt, int64_t* first, int64_t* last) const {
  *first = std::numeric_limits<int64_t>::max();
  *last = std::numeric_limits<int64_t>::min();
  std::vector<int64_t> steps;
  const auto add = [&](const Block& block) -> absl::Status {
    if (block.attempt != attempt) return absl::OkStatus();
    BW_RETURN_IF_ERROR(block.Steps(&steps));
    *first = std::min(*first, steps.front());
    *last = std::max(*last, steps.back());
    return absl::OkStatus();
  };
  BW_RETURN_IF_ERROR(VisitMemory(signal, add));
  BW_RETURN_IF_ERROR(VisitWindows(signal, 0, add));
  const SeriesAddress address{.run = run_, .signal = signal, .index = 0};
  const std::string prefix = AttemptPrefix('s', address, attempt);
  BW_RETURN_IF_ERROR(snapshot_.Scan(prefix, {}, [&](std::string_view key, std::string_view) {
    *first = std::min(*first, KeyFirstStep(key));
    return false;
  }));
  std::string key, value;
  const std::string end = SeriesRowKey('s', address, attempt, std::numeric_limits<int64_t>::max());
  BW_ASSIGN_OR_RETURN(const bool any, snapshot_.FindBefore(prefix, end, &key, &value));
  if (any) BW_RETURN_IF_ERROR(add(Block{attempt, 0, value, nullptr}));
  // What is old has summaries only.
  const std::string summaries = AttemptPrefix('m', address, attempt);
  std::string last_row;
  BW_RETURN_IF_ERROR(snapshot_.Scan(summaries, {}, [&](std::string_view found, std::string_view) {
    *first = std::min(*first, KeyFirstStep(found));
    return false;
  }));
  if (any) return absl::OkStatus();
  const std::string behind = SeriesRowKey('m', address, attempt, std::numeric_limits<int64_t>::max());
  BW_ASSIGN_OR_RETURN(const bool summarized, snapshot_.FindBefore(summaries, behind, &key, &last_row));
  std::vector<SummarizedSpan> spans;
  if (summarized) BW_RETURN_IF_ERROR(DecodeSpans(last_row, 0, &spans));
  if (!spans.empty()) *last = std::max(*last, spans.back().last_step);
  return absl::OkStatus();
}

absl::StatusOr<HistoryPoint> SeriesReader::Summarized() const {
  const absl::StatusOr<std::string> row = snapshot_.Get(RetentionKey(run_));
  if (absl::IsNotFound(row.status())) return HistoryPoint{0, INT64_MIN};
  BW_RETURN_IF_ERROR(row.status());
  BW_ASSIGN_OR_RETURN(const RetentionState state, DecodeRetentionState(*row));
  return state.summarized;
}

absl::Status SeriesReader::ReadAttemptSpans(uint16_t signal, size_t cell, uint32_t attempt, const SeriesRange& range,
                                            std::vector<SummarizedSpan>* spans) const {
  spans->clear();
  const SeriesAddress address{.run = run_, .signal = signal, .index = static_cast<uint32_t>(cell / kGroupCells)};
  const std::string prefix = AttemptPrefix('m', address, attempt);
  // The row that `begin` falls into starts before it.
  std::string from = SeriesRowKey('m', address, attempt, range.begin);
  std::string key, value;
  BW_ASSIGN_OR_RETURN(const bool before, snapshot_.FindBefore(prefix, from, &key, &value));
  if (before) from = key;
  absl::Status damage;
  BW_RETURN_IF_ERROR(snapshot_.Scan(prefix, from, [&](std::string_view found, std::string_view bytes) {
    if (KeyFirstStep(found) >= range.end) return false;
    damage = DecodeSpans(bytes, cell % kGroupCells, spans);
    return damage.ok();
  }));
  BW_RETURN_IF_ERROR(damage);
  for (const MemoryBlock& block : memory_) {
    if (block.signal != signal || block.attempt != attempt || block.summaries == nullptr) continue;
    if (block.first_cell == cell / kGroupCells * kGroupCells) {
      BW_RETURN_IF_ERROR(DecodeSpans(*block.summaries, cell % kGroupCells, spans));
    }
  }
  // What was stored between the look at memory and the snapshot is there twice.
  std::sort(spans->begin(), spans->end(),
            [](const SummarizedSpan& a, const SummarizedSpan& b) { return a.first_step < b.first_step; });
  spans->erase(
      std::unique(spans->begin(), spans->end(),
                  [](const SummarizedSpan& a, const SummarizedSpan& b) { return a.first_step == b.first_step; }),
      spans->end());
  return absl::OkStatus();
}

absl::Status SeriesReader::ReadSpans(uint16_t signal, size_t cell, uint8_t written, const SeriesRange& range,
                                     uint64_t steps_min, std::vector<SummarizedSpan>* spans) const {
  struct Extent {
    uint32_t attempt = 0;
    int64_t first = 0, last = 0;
  };
  spans->clear();
  BW_ASSIGN_OR_RETURN(const std::vector<uint32_t> attempts, Attempts(written));
  std::vector<Extent> extents;
  for (const uint32_t attempt : attempts) {
    if (!Wanted(range, attempt)) continue;
    Extent& extent = extents.emplace_back();
    extent.attempt = attempt;
    BW_RETURN_IF_ERROR(ReadExtent(written, attempt, &extent.first, &extent.last));
  }
  BW_ASSIGN_OR_RETURN(const HistoryPoint summarized, Summarized());
  std::vector<SummarizedSpan> row, gone;
  uint64_t steps = 0;
  for (const Extent& extent : extents) {
    BW_RETURN_IF_ERROR(ReadAttemptSpans(signal, cell, extent.attempt, range, &row));
    for (size_t i = 0; i < row.size(); ++i) {
      SummarizedSpan span = row[i];
      if (i + 1 < row.size()) span.next_step = std::max(span.next_step, row[i + 1].first_step);
      if (HistoryPoint{extent.attempt, span.last_step} <= summarized) {
        for (const Extent& other : extents) {
          if (other.attempt <= extent.attempt || other.last < span.first_step) continue;
          if (other.first <= span.first_step) {
            span.first_step = std::max(span.first_step, other.last + 1);
          } else if (other.first <= span.last_step) {
            span.last_step = other.first - 1;
            span.next_step = other.first;
          }
        }
        span.first_step = std::max(span.first_step, range.begin);
        span.last_step = std::min(span.last_step, range.end - 1);
        if (span.first_step <= span.last_step) gone.push_back(span);
        continue;
      }
      const bool shared = std::any_of(extents.begin(), extents.end(), [&](const Extent& other) {
        return other.attempt != extent.attempt && other.first < span.next_step && other.last >= span.first_step;
      });
      if (shared || span.first_step < range.begin || span.last_step >= range.end) continue;
      steps += span.steps;
      spans->push_back(span);
    }
  }
  if (steps < steps_min) spans->clear();
  spans->insert(spans->end(), gone.begin(), gone.end());
  std::sort(spans->begin(), spans->end(),
            [](const SummarizedSpan& a, const SummarizedSpan& b) { return a.first_step < b.first_step; });
  return absl::OkStatus();
}

absl::Status SeriesReader::AddChunks(uint16_t signal, size_t cell, uint32_t attempt, const SeriesRange& range,
                                     const std::vector<SummarizedSpan>& spans, std::vector<SeriesPoint>* points) const {
  const SeriesAddress address{.run = run_, .signal = signal, .index = static_cast<uint32_t>(cell / kGroupCells)};
  const std::string prefix = AttemptPrefix('s', address, attempt);
  std::string key, value;
  std::string read;  // The last chunk's key: one may lie on both sides of a span.
  SeriesRange gap = range;
  for (size_t i = 0; i <= spans.size(); ++i) {
    gap.end = i < spans.size() ? std::min(spans[i].first_step, range.end) : range.end;
    if (gap.begin < gap.end) {
      std::string from = SeriesRowKey('s', address, attempt, gap.begin);
      BW_ASSIGN_OR_RETURN(const bool before, snapshot_.FindBefore(prefix, from, &key, &value));
      if (before) from = key;
      absl::Status damage;
      BW_RETURN_IF_ERROR(snapshot_.Scan(prefix, from, [&](std::string_view found, std::string_view bytes) {
        if (KeyFirstStep(found) >= gap.end) return false;
        if (found <= read) return true;
        read = found;
        damage =
            AddPoints(Block{attempt, cell / kGroupCells * kGroupCells, bytes, nullptr}, cell, range, spans, points);
        return damage.ok();
      }));
      BW_RETURN_IF_ERROR(damage);
    }
    if (i < spans.size()) gap.begin = std::max(gap.begin, spans[i].next_step);
  }
  return absl::OkStatus();
}

absl::Status SeriesReader::ReadCell(uint16_t signal, size_t cell, const SeriesRange& range,
                                    const std::vector<SummarizedSpan>& spans, std::vector<SeriesPoint>* points) const {
  points->clear();
  const auto add = [&](const Block& block) {
    return Wanted(range, block.attempt) ? AddPoints(block, cell, range, spans, points) : absl::OkStatus();
  };
  BW_RETURN_IF_ERROR(VisitMemory(signal, add));
  BW_RETURN_IF_ERROR(VisitWindows(signal, static_cast<uint32_t>(cell / kPartCells), add));
  BW_ASSIGN_OR_RETURN(const std::vector<uint32_t> attempts, Attempts(signal));
  for (const uint32_t attempt : attempts) {
    if (Wanted(range, attempt)) BW_RETURN_IF_ERROR(AddChunks(signal, cell, attempt, range, spans, points));
  }
  const auto older = [](const SeriesPoint& a, const SeriesPoint& b) {
    return a.step != b.step ? a.step < b.step : a.attempt > b.attempt;
  };
  if (!std::is_sorted(points->begin(), points->end(), older)) std::sort(points->begin(), points->end(), older);
  points->erase(std::unique(points->begin(), points->end(),
                            [](const SeriesPoint& a, const SeriesPoint& b) { return a.step == b.step; }),
                points->end());
  std::erase_if(*points, [&spans](const SeriesPoint& point) { return InSpans(spans, point.step); });
  return absl::OkStatus();
}

absl::StatusOr<SampleAt> SeriesReader::FindSample(uint16_t signal, int64_t step, bool newest) const {
  SampleAt best;
  std::vector<int64_t> steps;
  const auto consider = [&](const Block& block) -> absl::Status {
    if (block.first_cell != 0) return absl::OkStatus();
    BW_RETURN_IF_ERROR(block.Steps(&steps));
    const auto after = std::upper_bound(steps.begin(), steps.end(), step);
    if (after == steps.begin()) return absl::OkStatus();
    const SampleAt at{.step = *(after - 1), .attempt = block.attempt, .found = true};
    const bool better = newest ? std::pair(at.attempt, at.step) > std::pair(best.attempt, best.step)
                               : std::pair(at.step, at.attempt) > std::pair(best.step, best.attempt);
    if (!best.found || better) best = at;
    return absl::OkStatus();
  };
  BW_RETURN_IF_ERROR(VisitMemory(signal, consider));
  BW_RETURN_IF_ERROR(VisitWindows(signal, 0, consider));
  BW_ASSIGN_OR_RETURN(const std::vector<uint32_t> attempts, Attempts(signal));
  const SeriesAddress address{.run = run_, .signal = signal, .index = 0};
  std::string key, value;
  for (const uint32_t attempt : attempts) {
    const std::string at = SeriesRowKey('s', address, attempt, step);
    BW_ASSIGN_OR_RETURN(const bool found, snapshot_.FindBefore(AttemptPrefix('s', address, attempt), at, &key, &value));
    if (found) BW_RETURN_IF_ERROR(consider(Block{attempt, 0, value, nullptr}));
  }
  return best;
}

absl::StatusOr<bool> SeriesReader::ReadRow(uint16_t signal, const SampleAt& at, size_t cells,
                                           std::vector<float>* row) const {
  row->assign(cells, NotMeasured());
  std::vector<int64_t> steps;
  Chunk memory;
  bool any = false;
  const auto copy = [&](const Block& block) -> absl::Status {
    BW_RETURN_IF_ERROR(block.Steps(&steps));
    const auto found = std::lower_bound(steps.begin(), steps.end(), at.step);
    if (block.attempt != at.attempt || found == steps.end() || *found != at.step || block.first_cell >= cells) {
      return absl::OkStatus();
    }
    const Chunk* chunk = nullptr;
    BW_RETURN_IF_ERROR(block.Decode(&memory, &chunk));
    const float* const values = chunk->values.data() + (found - steps.begin()) * static_cast<ptrdiff_t>(chunk->cells);
    std::copy_n(values, std::min(chunk->cells, cells - block.first_cell),
                row->begin() + static_cast<ptrdiff_t>(block.first_cell));
    any = true;
    return absl::OkStatus();
  };
  // A step is whole in one place: in memory, in windows, or in chunks.
  BW_RETURN_IF_ERROR(VisitMemory(signal, copy));
  if (any) return true;
  for (uint32_t part = 0; part * kPartCells < cells; ++part) BW_RETURN_IF_ERROR(VisitWindows(signal, part, copy));
  if (any) return true;
  std::string key, value;
  for (size_t cell = 0; cell < cells; cell += kGroupCells) {
    const SeriesAddress address{.run = run_, .signal = signal, .index = static_cast<uint32_t>(cell / kGroupCells)};
    const std::string exact = SeriesRowKey('s', address, at.attempt, at.step);
    BW_ASSIGN_OR_RETURN(const bool found,
                        snapshot_.FindBefore(AttemptPrefix('s', address, at.attempt), exact, &key, &value));
    if (!found) break;
    BW_RETURN_IF_ERROR(copy(Block{at.attempt, cell, value, nullptr}));
    if (!any) break;
  }
  return any;
}

}  // namespace bellwether::server
