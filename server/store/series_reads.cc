#include "server/store/series_reads.h"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "server/store/downsample.h"
#include "server/store/run_windows.h"
#include "server/store/sample_cursor.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr int kFindTriesMax = 64;  // Samples to look at for one that has both parts of a derived signal.

uint16_t Index(SignalId signal) { return static_cast<uint16_t>(signal); }

// A signal may have fewer heads than the one that was asked for: a query head's
// key head.
size_t CellOf(MatrixShape from, MatrixShape of, const SeriesKey& key) {
  const int64_t head = of.heads == 0 ? 0 : int64_t{key.head} * from.heads / of.heads;
  return static_cast<size_t>(int64_t{key.layer} * from.heads + head);
}

// Both by rising step.  Parts of two attempts are not one sample.
std::vector<SeriesPoint> Derive(const SignalInfo& info, const std::vector<SeriesPoint>& numerators,
                                const std::vector<SeriesPoint>& denominators) {
  std::vector<SeriesPoint> derived;
  auto below = denominators.begin();
  for (const SeriesPoint& above : numerators) {
    while (below != denominators.end() && below->step < above.step) ++below;
    if (below == denominators.end()) break;
    if (below->step != above.step || below->attempt != above.attempt) continue;
    derived.push_back({above.step, above.attempt, DeriveValue(info, above.value, below->value)});
  }
  return derived;
}

}  // namespace

std::vector<CellKey> CellsOf(const SignalInfo& info, const Layout& layout, const SeriesKey& key) {
  const MatrixShape shape = ShapeOf(info, layout);
  std::vector<CellKey> cells = {{Index(info.id), CellOf(shape, shape, key)}};
  if (!info.derived) return cells;
  for (const SignalId part : {info.numerator, info.denominator}) {
    cells.push_back({Index(part), CellOf(ShapeOf(*FindSignal(part), layout), shape, key)});
  }
  return cells;
}

absl::StatusOr<SeriesPoints> ReadSeriesFrom(const SeriesReader& reader, const Layout& layout, const SeriesKey& key,
                                            const SeriesRange& range, size_t points_max) {
  const SignalInfo& info = *FindSignal(key.signal);
  const std::vector<CellKey> cells = CellsOf(info, layout, key);
  const CellKey& own = cells[0];
  const CellKey& written = info.derived ? cells[1] : own;
  // A bucket of at least half a span: whole spans still give enough points.
  const uint64_t summarize_from = uint64_t{points_max} * kSpanSteps / 2 + 1;
  std::vector<SummarizedSpan> spans;
  BW_RETURN_IF_ERROR(reader.ReadSpans(own.signal, own.cell, written.signal, range, summarize_from, &spans));
  std::vector<SeriesPoint> points;
  BW_RETURN_IF_ERROR(reader.ReadCell(written.signal, written.cell, range, spans, &points));
  if (info.derived) {
    std::vector<SeriesPoint> divisors;
    BW_RETURN_IF_ERROR(reader.ReadCell(cells[2].signal, cells[2].cell, range, spans, &divisors));
    points = Derive(info, points, divisors);
  }
  return Downsample(points, spans, points_max);
}

absl::StatusOr<std::vector<float>> ReadMatrixFrom(const SeriesReader& reader, const Layout& layout,
                                                  const SignalInfo& info, int64_t step, int64_t* at) {
  *at = -1;
  const bool newest = step < 0;
  if (newest) step = std::numeric_limits<int64_t>::max();
  std::set<SignalId> parts = {info.id};
  if (info.derived) parts = {info.numerator, info.denominator};

  StepSample sample;
  std::vector<float> row;
  for (int tries = 0; tries < kFindTriesMax; ++tries) {
    BW_ASSIGN_OR_RETURN(const SampleAt found, reader.FindSample(Index(*parts.begin()), step, newest && tries == 0));
    if (!found.found) return std::vector<float>{};
    sample.Reset(layout);
    bool all = true;
    for (const SignalId part : parts) {
      const auto cells = static_cast<size_t>(ShapeOf(*FindSignal(part), layout).size());
      BW_ASSIGN_OR_RETURN(const bool has, reader.ReadRow(Index(part), found, cells, &row));
      all = all && has;
      if (has) std::copy(row.begin(), row.end(), sample.Add(part).begin());
    }
    if (all && DeriveMatrix(sample, info, &row)) {
      *at = found.step;
      return row;
    }
    if (found.step == std::numeric_limits<int64_t>::min()) break;
    step = found.step - 1;
  }
  return std::vector<float>{};
}

absl::Status ReadAllFrom(const SeriesReader& reader, const Layout& layout,
                         const std::function<absl::Status(const StepSample&)>& visit) {
  BW_ASSIGN_OR_RETURN(const std::vector<uint32_t> attempts, reader.Attempts(kMetaSignal));
  for (const uint32_t attempt : attempts) {
    SampleCursor meta(&reader, kMetaSignal, attempt, kMetaCells);
    BW_RETURN_IF_ERROR(meta.Start());
    std::map<SignalId, std::unique_ptr<SampleCursor>> cursors;
    for (size_t i = 0; i < SignalCount(); ++i) {
      const SignalInfo& info = SignalTable()[i];
      if (info.derived) continue;
      const auto cells = static_cast<size_t>(ShapeOf(info, layout).size());
      auto cursor = std::make_unique<SampleCursor>(&reader, Index(info.id), attempt, cells);
      BW_RETURN_IF_ERROR(cursor->Start());
      if (cursor->valid()) cursors[info.id] = std::move(cursor);
    }
    while (meta.valid()) {
      StepSample sample;
      sample.Reset(layout);
      sample.attempt = attempt;
      sample.step = meta.step();
      for (auto& [signal, cursor] : cursors) {
        if (!cursor->valid() || cursor->step() != sample.step) continue;
        std::copy(cursor->row().begin(), cursor->row().end(), sample.Add(signal).begin());
        BW_RETURN_IF_ERROR(cursor->Next());
      }
      DecodeMeta({meta.row().begin(), meta.row().end()}, &sample);
      BW_RETURN_IF_ERROR(meta.Next());
      BW_RETURN_IF_ERROR(visit(sample));
    }
  }
  return absl::OkStatus();
}

}  // namespace bellwether::server
