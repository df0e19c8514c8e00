#include "server/ingest/rank_merge.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

namespace bellwether::server {
namespace {

// Of whose cells it is known by how many ranks they were reported.
bool IsCounted(const SignalInfo& signal) { return signal.merge == Merge::kMean || OfNamedRows(signal.granularity); }

bool SameBits(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }

}  // namespace

RankMerge::RankMerge(const Layout& layout, uint32_t reporters, size_t open_steps_max)
    : layout_(layout), reporters_(reporters), open_steps_max_(open_steps_max) {}

void RankMerge::Grow(const Layout& layout) {
  layout_ = layout;
  for (auto& [key, open] : open_) open.sample.Grow(layout);
}

void RankMerge::Combine(uint32_t rank, const RankFrame& frame, Open* open) {
  StepSample& sample = open->sample;
  sample.time_unix_ns = std::max(sample.time_unix_ns, frame.time_unix_ns);
  for (const RankBlock& block : frame.blocks) {
    const SignalInfo& signal = *FindSignal(block.signal);
    const MatrixShape shape = ShapeOf(signal, layout_);
    const std::span<float> matrix = sample.Add(block.signal);
    const float* in = frame.values.data() + block.offset;
    std::vector<Reports>* const reports = IsCounted(signal) ? &open->reports[block.signal] : nullptr;
    if (reports != nullptr) reports->resize(matrix.size());
    for (int32_t layer = 0; layer < block.layer_count; ++layer) {
      float* row = matrix.data() + (block.layer_begin + layer) * shape.heads + block.head_begin;
      for (int32_t head = 0; head < block.head_count; ++head, ++in) {
        if (IsNotMeasured(*in)) continue;
        float& cell = row[head];
        const auto at = static_cast<size_t>(&cell - matrix.data());
        Reports counted;
        if (reports != nullptr) {
          Reports& here = (*reports)[at];
          if (here.count++ == 0) here.first_rank = rank;
          counted = here;
        }
        if (IsNotMeasured(cell)) {
          cell = *in;
          continue;
        }
        switch (signal.merge) {
          case Merge::kSum:
            cell += *in;
            break;
          case Merge::kMax:
            if (std::isnan(*in) || *in > cell) cell = *in;
            break;
          case Merge::kMean:
            cell += (*in - cell) / static_cast<float>(counted.count);
            break;
          case Merge::kEqual:
            if (!SameBits(cell, *in)) {
              RecordDisagreement({.signal = block.signal,
                                  .layer = block.layer_begin + layer,
                                  .head = block.head_begin + head,
                                  .low = std::min(cell, *in),
                                  .high = std::max(cell, *in),
                                  .first_rank = counted.first_rank},
                                 rank, at, open);
            }
            break;
          case Merge::kNone:
            break;
        }
      }
    }
  }
}

// As many as all heads of a large model times its ranks may differ in one step.
void RankMerge::RecordDisagreement(const StepSample::Disagreement& found, uint32_t rank, size_t cell, Open* open) {
  std::vector<StepSample::Disagreement>& all = open->sample.disagreements;
  auto known = open->disagreeing.find({found.signal, cell});
  if (known == open->disagreeing.end()) {
    if (all.size() == StepSample::kDisagreementsMax) {
      ++open->sample.disagreements_left_out;
      return;
    }
    known = open->disagreeing.emplace(std::pair(found.signal, cell), all.size()).first;
    all.push_back(found);
  }
  StepSample::Disagreement& here = all[known->second];
  here.low = std::min(here.low, found.low);
  here.high = std::max(here.high, found.high);
  ++here.ranks_total;
  if (here.ranks.size() < StepSample::Disagreement::kRanksMax) here.ranks.push_back(rank);
}

RankMerge::Outcome RankMerge::Add(uint32_t rank, const RankFrame& frame, Lsn lsn, const Sink& sink) {
  const Key key{frame.attempt, frame.step};
  // By what is late, too: the rank's next steps are waited for.  A straggler of an attempt
  // before is taken and not waited for.
  if (!replay_ && (frame.attempt >= ranks_.attempt || ranks_.heard.contains(rank))) {
    ranks_.gone.erase(rank);
    Key& newest = ranks_.heard.try_emplace(rank, key).first->second;
    newest = std::max(newest, key);
  }
  if (key <= Key{closed_attempt_, closed_step_}) return Outcome::kLate;
  Open& open = *OpenStep(key, lsn);
  std::set<uint32_t>& parts = open.parts[rank];
  if (!parts.insert(frame.part).second) return Outcome::kRepeated;
  Combine(rank, frame, &open);
  if (parts.size() == frame.parts) {
    open.whole.insert(rank);
    open.sample.ranks = static_cast<uint32_t>(open.whole.size());
  }
  CloseReady(sink);
  return Outcome::kTaken;
}

RankMerge::Open* RankMerge::OpenStep(const Key& key, Lsn lsn) {
  auto [step, is_new] = open_.try_emplace(key);
  Open& open = step->second;
  if (is_new) {
    open.sample = std::move(spare_);
    open.sample.Reset(layout_);
    open.sample.attempt = key.first;
    open.sample.step = key.second;
    open.first_lsn = lsn;
  }
  return &open;
}

bool RankMerge::Hold(uint32_t attempt, int64_t step, Lsn lsn, int holds) {
  const Key key{attempt, step};
  if (key <= Key{closed_attempt_, closed_step_}) return false;
  OpenStep(key, lsn)->holds += holds;
  return true;
}

bool RankMerge::Holding(uint32_t rank) const {
  const auto newest = ranks_.heard.find(rank);
  if (newest == ranks_.heard.end()) return false;
  for (auto step = open_.begin(); step != open_.end() && step->first <= newest->second; ++step) {
    if (step->second.holds > 0) return true;
  }
  return false;
}

bool RankMerge::Fill(uint32_t attempt, int64_t step, const std::vector<Cell>& cells, const Sink& sink) {
  const auto found = open_.find({attempt, step});
  if (found == open_.end() || found->second.holds == 0) return false;
  Open& open = found->second;
  for (const Cell& cell : cells) {
    const MatrixShape shape = ShapeOf(*FindSignal(cell.signal), layout_);
    float& value = open.sample.Add(cell.signal)[static_cast<size_t>(cell.layer * shape.heads + cell.head)];
    if (IsNotMeasured(value)) value = cell.value;
  }
  --open.holds;
  CloseReady(sink);
  return true;
}

size_t RankMerge::expected() const { return reporters_ - std::min<size_t>(reporters_, ranks_.gone.size()); }

size_t RankMerge::Present(const Open& open) const {
  return static_cast<size_t>(std::count_if(open.whole.begin(), open.whole.end(),
                                           [this](uint32_t rank) { return !ranks_.gone.contains(rank); }));
}

bool RankMerge::IsComplete(const Key& key, const Open& open) const {
  const size_t waited_for = std::max<size_t>(1, expected());
  if (Present(open) >= waited_for) return true;
  if (open.whole.empty()) return false;
  // Every rank that still takes part has sent this step or is past it; ranks
  // that were never heard of are waited for.
  if (ranks_.heard.size() < waited_for) return false;
  return std::all_of(ranks_.heard.begin(), ranks_.heard.end(),
                     [&](const auto& rank) { return rank.second > key || open.whole.count(rank.first) > 0; });
}

void RankMerge::LeaveOutParts(Open* open) {
  if (open->sample.attempt != ranks_.attempt) return;
  for (const auto& [id, reports] : open->reports) {
    const SignalInfo& signal = *FindSignal(id);
    if (signal.granularity != Granularity::kTensor || signal.merge != Merge::kSum) continue;
    std::vector<uint16_t>& most = tellers_[id];
    most.resize(std::max(most.size(), reports.size()));
    const std::span<float> values = open->sample.Add(id);
    for (size_t row = 0; row < reports.size(); ++row) {
      const auto count = static_cast<uint16_t>(std::min<uint32_t>(reports[row].count, UINT16_MAX));
      if (count < most[row]) values[row] = NotMeasured();
      most[row] = std::max(most[row], count);
    }
  }
}

void RankMerge::Close(std::map<Key, Open>::iterator step, bool complete, const Sink& sink) {
  closed_attempt_ = step->first.first;
  closed_step_ = step->first.second;
  Open& open = step->second;
  open.sample.complete = complete && !open.whole.empty() && Present(open) >= expected();
  LeaveOutParts(&open);
  for (const auto& [where, index] : open.disagreeing) {
    const auto reports = open.reports.find(where.first);
    if (reports != open.reports.end()) open.sample.disagreements[index].reporters = reports->second[where.second].count;
  }
  // What came without any frame is of no step that anybody measured.
  if (!open.parts.empty()) sink(open.sample);
  spare_ = std::move(open.sample);
  open_.erase(step);
}

void RankMerge::CloseReady(const Sink& sink) {
  // A complete step closes everything before it: each rank is past that.  A
  // held one keeps itself and what is behind it open.
  while (!replay_) {
    auto ready = open_.end();
    for (auto step = open_.begin(); step != open_.end() && step->second.holds == 0; ++step) {
      if (IsComplete(step->first, step->second)) ready = step;
    }
    if (ready != open_.end()) {
      const Key last = ready->first;
      while (!open_.empty() && open_.begin()->first <= last) Close(open_.begin(), true, sink);
    }
    if (open_.size() <= open_steps_max_) return;
    Close(open_.begin(), open_.begin()->second.holds > 0, sink);
  }
}

void RankMerge::CloseThrough(uint32_t attempt, int64_t step, const Sink& sink) {
  const Key last{attempt, step};
  while (!open_.empty() && open_.begin()->first <= last) Close(open_.begin(), false, sink);
  CloseReady(sink);  // What was behind a held step.
}

void RankMerge::Join(uint32_t rank, uint32_t attempt, uint32_t reporters) {
  if (attempt < ranks_.attempt) return;
  if (attempt > ranks_.attempt) {
    ranks_ = {.attempt = attempt, .heard = {}, .gone = {}};
    tellers_.clear();
  }
  reporters_ = reporters;
  ranks_.gone.erase(rank);
  ranks_.heard.try_emplace(rank, kHelloOnly);
}

uint32_t RankMerge::reporting() const {
  return static_cast<uint32_t>(std::count_if(ranks_.heard.begin(), ranks_.heard.end(),
                                             [](const auto& rank) { return rank.second != kHelloOnly; }));
}

void RankMerge::SetGone(uint32_t rank, const Sink& sink) {
  if (ranks_.heard.erase(rank) == 0) return;
  ranks_.gone.insert(rank);
  if (ranks_.heard.empty() || expected() == 0) {  // Nobody is left.
    while (!open_.empty()) Close(open_.begin(), true, sink);
    return;
  }
  CloseReady(sink);
}

Lsn RankMerge::oldest_open_lsn() const {
  Lsn oldest = 0;
  for (const auto& [key, open] : open_) oldest = oldest == 0 ? open.first_lsn : std::min(oldest, open.first_lsn);
  return oldest;
}

bool RankMerge::OldestOpen(uint32_t* attempt, int64_t* step) const {
  if (open_.empty()) return false;
  *attempt = open_.begin()->first.first;
  *step = open_.begin()->first.second;
  return true;
}

void RankMerge::Restore(uint32_t closed_attempt, int64_t closed_step, Ranks ranks) {
  closed_attempt_ = closed_attempt;
  closed_step_ = closed_step;
  ranks_ = std::move(ranks);
}

}  // namespace bellwether::server
