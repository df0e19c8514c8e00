#include "server/store/series_reader.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

struct ChunkRef {
  uint32_t attempt = 0;
  int64_t first_step = 0, last_step = 0;
  uint32_t steps = 0;
  SeriesSummary summary;
};

// Steps that an attempt covers, at least.
struct Hull {
  int64_t first = std::numeric_limits<int64_t>::max(), last = std::numeric_limits<int64_t>::min();
  void Add(int64_t from, int64_t to) {
    first = std::min(first, from);
    last = std::max(last, to);
  }
};

bool Wanted(const SeriesRange& range, uint32_t attempt) {
  return range.attempt == SeriesStore::kNewestAttempt || static_cast<uint32_t>(range.attempt) == attempt;
}

void AddPoints(const Chunk& chunk, size_t column, uint32_t attempt, const SeriesRange& range,
               std::vector<SeriesPoint>* points) {
  if (column >= chunk.cells) return;
  const auto from = std::lower_bound(chunk.steps.begin(), chunk.steps.end(), range.begin) - chunk.steps.begin();
  for (auto i = static_cast<size_t>(from); i < chunk.steps.size() && chunk.steps[i] < range.end; ++i) {
    points->push_back({chunk.steps[i], attempt, chunk.values[i * chunk.cells + column]});
  }
}

absl::Status Damaged() { return absl::DataLossError("stored series: damaged key"); }

}  // namespace

template <typename Visit>
absl::Status SeriesReader::VisitWindows(uint8_t signal, uint32_t part, Visit visit) const {
  Chunk chunk;
  for (const MemoryWindow& window : memory_) {
    if (window.signal != signal || window.part != part) continue;
    if (window.open != nullptr) {
      visit(window.attempt, *window.open);
      continue;
    }
    BW_RETURN_IF_ERROR(DecodeChunk(*window.bytes, &chunk));
    visit(window.attempt, chunk);
  }
  absl::Status damage;
  const SeriesAddress address{.run = run_, .signal = signal, .index = part};
  BW_RETURN_IF_ERROR(snapshot_.Scan(SeriesPrefix('w', address), {}, [&](std::string_view key, std::string_view value) {
    damage = key.size() == kSeriesKeyBytes ? DecodeChunk(value, &chunk) : Damaged();
    if (damage.ok()) visit(KeyAttempt(key), chunk);
    return damage.ok();
  }));
  return damage;
}

absl::StatusOr<std::vector<uint32_t>> SeriesReader::Attempts(uint8_t signal) const {
  std::set<uint32_t> attempts;
  for (const MemoryWindow& window : memory_) {
    if (window.signal == signal) attempts.insert(window.attempt);
  }
  // One jump per attempt, not one step per chunk.
  for (const char prefix : {'w', 'm'}) {
    const SeriesAddress address{.run = run_, .signal = signal, .index = 0};
    std::string from;
    for (bool more = true; more;) {
      more = false;
      BW_RETURN_IF_ERROR(snapshot_.Scan(SeriesPrefix(prefix, address), from,
                                        [&](std::string_view key, std::string_view) {
                                          if (key.size() != kSeriesKeyBytes) return false;
                                          attempts.insert(KeyAttempt(key));
                                          more = KeyAttempt(key) != std::numeric_limits<uint32_t>::max();
                                          from = SeriesRowKey(prefix, address, KeyAttempt(key) + 1,
                                                              std::numeric_limits<int64_t>::min());
                                          return false;
                                        }));
    }
  }
  return std::vector<uint32_t>(attempts.begin(), attempts.end());
}

absl::Status SeriesReader::ReadCell(uint8_t signal, size_t cell, const SeriesRange& range, uint64_t summarize_from,
                                    std::vector<SeriesPoint>* points, std::vector<SummarizedSpan>* spans) const {
  points->clear();
  spans->clear();
  BW_RETURN_IF_ERROR(VisitWindows(signal, static_cast<uint32_t>(cell / kPartCells),
                                  [&](uint32_t attempt, const Chunk& chunk) {
                                    if (Wanted(range, attempt)) AddPoints(chunk, cell % kPartCells, attempt, range, points);
                                  }));
  std::map<uint32_t, Hull> hulls;
  for (const SeriesPoint& point : *points) hulls[point.attempt].Add(point.step, point.step);

  const SeriesAddress address{.run = run_, .signal = signal, .index = static_cast<uint32_t>(cell / kGroupCells)};
  BW_ASSIGN_OR_RETURN(const std::vector<uint32_t> attempts, Attempts(signal));
  std::vector<ChunkRef> chunks;
  ChunkSummary summary;
  std::string key, value;
  for (const uint32_t attempt : attempts) {
    if (!Wanted(range, attempt)) continue;
    const std::string prefix = SeriesRowKey('m', address, attempt, 0).substr(0, kSeriesPrefixBytes + 4);
    // The chunk that `begin` falls into starts before it.
    std::string from = SeriesRowKey('m', address, attempt, range.begin);
    BW_ASSIGN_OR_RETURN(const bool before, snapshot_.FindBefore(prefix, from, &key, &value));
    if (before) from = key;
    absl::Status damage;
    BW_RETURN_IF_ERROR(snapshot_.Scan(prefix, from, [&](std::string_view, std::string_view bytes) {
      damage = DecodeSummary(bytes, &summary);
      if (!damage.ok() || summary.first_step >= range.end) return false;
      if (summary.last_step < range.begin || cell % kGroupCells >= summary.series.size()) return true;
      chunks.push_back({attempt, summary.first_step, summary.last_step, summary.steps,
                        summary.series[cell % kGroupCells]});
      hulls[attempt].Add(summary.first_step, summary.last_step);
      return true;
    }));
    BW_RETURN_IF_ERROR(damage);
  }

  const auto whole = [&](const ChunkRef& chunk) {
    if (chunk.first_step < range.begin || chunk.last_step >= range.end) return false;
    return std::none_of(hulls.begin(), hulls.end(), [&](const auto& hull) {
      return hull.first != chunk.attempt && hull.second.first <= chunk.last_step && hull.second.last >= chunk.first_step;
    });
  };
  uint64_t whole_steps = 0;
  for (const ChunkRef& chunk : chunks) whole_steps += whole(chunk) ? chunk.steps : 0;
  const bool summarize = whole_steps >= summarize_from;
  Chunk chunk;
  for (const ChunkRef& ref : chunks) {
    if (summarize && whole(ref)) {
      spans->push_back({ref.first_step, ref.last_step, ref.summary});
      continue;
    }
    BW_ASSIGN_OR_RETURN(value, snapshot_.Get(SeriesRowKey('s', address, ref.attempt, ref.first_step)));
    BW_RETURN_IF_ERROR(DecodeChunk(value, &chunk));
    AddPoints(chunk, cell % kGroupCells, ref.attempt, range, points);
  }
  std::sort(spans->begin(), spans->end(),
            [](const SummarizedSpan& a, const SummarizedSpan& b) { return a.first_step < b.first_step; });
  const auto older = [](const SeriesPoint& a, const SeriesPoint& b) {
    return a.step != b.step ? a.step < b.step : a.attempt > b.attempt;
  };
  if (!std::is_sorted(points->begin(), points->end(), older)) std::sort(points->begin(), points->end(), older);
  points->erase(std::unique(points->begin(), points->end(),
                            [](const SeriesPoint& a, const SeriesPoint& b) { return a.step == b.step; }),
                points->end());
  // A window that was packed between the look at memory and the snapshot.
  std::erase_if(*points, [spans](const SeriesPoint& point) {
    const auto after = std::upper_bound(spans->begin(), spans->end(), point.step,
                                        [](int64_t step, const SummarizedSpan& span) { return step < span.first_step; });
    return after != spans->begin() && point.step <= (after - 1)->last_step;
  });
  return absl::OkStatus();
}

absl::StatusOr<SampleAt> SeriesReader::FindSample(uint8_t signal, int64_t step, bool newest) const {
  SampleAt best;
  const auto consider = [&](uint32_t attempt, const std::vector<int64_t>& steps) {
    const auto after = std::upper_bound(steps.begin(), steps.end(), step);
    if (after == steps.begin()) return;
    const SampleAt at{.step = *(after - 1), .attempt = attempt, .found = true};
    const bool better = newest ? std::pair(at.attempt, at.step) > std::pair(best.attempt, best.step)
                               : std::pair(at.step, at.attempt) > std::pair(best.step, best.attempt);
    if (!best.found || better) best = at;
  };
  BW_RETURN_IF_ERROR(
      VisitWindows(signal, 0, [&](uint32_t attempt, const Chunk& chunk) { consider(attempt, chunk.steps); }));
  BW_ASSIGN_OR_RETURN(const std::vector<uint32_t> attempts, Attempts(signal));
  const SeriesAddress address{.run = run_, .signal = signal, .index = 0};
  std::string key, value;
  std::vector<int64_t> steps;
  for (const uint32_t attempt : attempts) {
    const std::string at = SeriesRowKey('s', address, attempt, step);
    BW_ASSIGN_OR_RETURN(const bool found, snapshot_.FindBefore(at.substr(0, kSeriesPrefixBytes + 4), at, &key, &value));
    if (!found) continue;
    BW_RETURN_IF_ERROR(DecodeChunkSteps(value, &steps));
    consider(attempt, steps);
  }
  return best;
}

absl::StatusOr<bool> SeriesReader::ReadRow(uint8_t signal, const SampleAt& at, size_t cells,
                                           std::vector<float>* row) const {
  row->assign(cells, NotMeasured());
  const auto copy = [&](const Chunk& chunk, size_t first_cell) {
    const auto found = std::lower_bound(chunk.steps.begin(), chunk.steps.end(), at.step);
    if (found == chunk.steps.end() || *found != at.step || first_cell >= cells) return false;
    const float* const values = chunk.values.data() + (found - chunk.steps.begin()) * static_cast<ptrdiff_t>(chunk.cells);
    std::copy_n(values, std::min(chunk.cells, cells - first_cell), row->begin() + static_cast<ptrdiff_t>(first_cell));
    return true;
  };
  bool any = false;
  Chunk chunk;
  std::string key, value;
  for (size_t part = 0; part * kPartCells < cells; ++part) {
    bool in_window = false;
    BW_RETURN_IF_ERROR(VisitWindows(signal, static_cast<uint32_t>(part), [&](uint32_t attempt, const Chunk& window) {
      if (attempt == at.attempt && copy(window, part * kPartCells)) in_window = true;
    }));
    any = any || in_window;
    if (in_window) continue;
    for (size_t cell = part * kPartCells; cell < std::min(cells, (part + 1) * kPartCells); cell += kGroupCells) {
      const SeriesAddress address{.run = run_, .signal = signal, .index = static_cast<uint32_t>(cell / kGroupCells)};
      const std::string exact = SeriesRowKey('s', address, at.attempt, at.step);
      BW_ASSIGN_OR_RETURN(const bool found,
                          snapshot_.FindBefore(exact.substr(0, kSeriesPrefixBytes + 4), exact, &key, &value));
      if (!found) break;
      BW_RETURN_IF_ERROR(DecodeChunk(value, &chunk));
      if (!copy(chunk, cell)) break;
      any = true;
    }
  }
  return any;
}

}  // namespace bellwether::server
