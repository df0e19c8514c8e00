#include "server/ingest/row_maps.h"

#include <algorithm>
#include <utility>

namespace bellwether::server {
namespace {

// Rows that may be none of the run's, though the block passed the limits of the wire.
bool MayMiss(Granularity granularity) {
  return OfNamedRows(granularity) || granularity == Granularity::kRank || granularity == Granularity::kExpert;
}

}  // namespace

bool RowMaps::IsPlain(const RankFrame& frame) {
  return std::ranges::none_of(frame.blocks,
                              [](const RankBlock& block) { return MayMiss(FindSignal(block.signal)->granularity); });
}

void RowMaps::Map::Append(int32_t row) {
  const auto at = static_cast<size_t>(row);
  if (row >= 0 && at >= taken.size()) taken.resize(at + 1);
  if (row >= 0 && taken[at]) row = -1;
  if (row >= 0) taken[at] = true;
  to.push_back(row);
}

size_t RowMaps::Add(uint32_t rank, const NamesMessage& message, RunRows* rows) {
  Rank& known = ranks_[rank];
  if (message.attempt < known.attempt) return message.names.size();
  if (message.attempt > known.attempt) known = {.attempt = message.attempt, .rows = {}};
  Map& map = known.rows[Index(message.granularity)];
  if (static_cast<size_t>(message.first) > map.to.size()) return message.names.size();
  RowNames& names = rows->of(message.granularity);
  size_t refused = 0;
  for (size_t i = 0; i < message.names.size(); ++i) {
    const size_t row = static_cast<size_t>(message.first) + i;
    if (row < map.to.size()) {  // The client says again what may not have arrived.
      refused += map.to[row] != names.Find(message.names[i]);
      continue;
    }
    map.Append(names.Add(message.names[i]));
    refused += map.to.back() < 0;
  }
  return refused;
}

RankFrame RowMaps::Translate(uint32_t rank, const RankFrame& frame, const Layout& layout, uint64_t* left_out) const {
  const auto known = ranks_.find(rank);
  RankFrame out = frame;
  out.blocks.clear();
  for (const RankBlock& block : frame.blocks) {
    const SignalInfo& signal = *FindSignal(block.signal);
    if (!MayMiss(signal.granularity)) {
      out.blocks.push_back(block);
      continue;
    }
    const MatrixShape shape = ShapeOf(signal, layout);
    const bool named = OfNamedRows(signal.granularity);
    const bool has_map = named && known != ranks_.end() && known->second.attempt == frame.attempt;
    static const std::vector<int32_t> none;
    const std::vector<int32_t>& map = has_map ? known->second.rows[Index(signal.granularity)].to : none;
    if (block.head_begin + block.head_count > shape.heads) {
      *left_out += static_cast<uint64_t>(block.layer_count) * static_cast<uint64_t>(block.head_count);
      continue;
    }
    // One block for each stretch of rows that follow each other in the run, too.
    RankBlock stretch = block;
    stretch.layer_count = 0;
    for (int32_t i = 0; i < block.layer_count; ++i) {
      const int32_t at = block.layer_begin + i;
      int32_t row = at;
      if (named) row = static_cast<size_t>(at) < map.size() ? map[static_cast<size_t>(at)] : -1;
      if (row >= shape.layers) row = -1;
      if (row >= 0 && stretch.layer_count > 0 && row == stretch.layer_begin + stretch.layer_count) {
        ++stretch.layer_count;
        continue;
      }
      if (stretch.layer_count > 0) out.blocks.push_back(stretch);
      stretch.layer_count = row < 0 ? 0 : 1;
      stretch.layer_begin = row;
      stretch.offset = block.offset + static_cast<size_t>(i) * static_cast<size_t>(block.head_count);
      if (row < 0) *left_out += static_cast<uint64_t>(block.head_count);
    }
    if (stretch.layer_count > 0) out.blocks.push_back(stretch);
  }
  return out;
}

void RowMaps::Save(ByteWriter* out) const {
  out->PutVarint(ranks_.size());
  for (const auto& [number, rank] : ranks_) {
    out->PutVarint(number);
    out->PutVarint(rank.attempt);
    for (const Map& map : rank.rows) {
      out->PutVarint(map.to.size());
      int32_t before = 0;  // Most rows follow each other.
      for (const int32_t row : map.to) out->PutSigned(row - std::exchange(before, row));
    }
  }
}

bool RowMaps::Restore(ByteReader* in) {
  ranks_.clear();
  for (size_t left = in->GetCount(4); left > 0; --left) {
    Rank& rank = ranks_[static_cast<uint32_t>(in->GetVarint())];
    rank.attempt = static_cast<uint32_t>(in->GetVarint());
    for (Map& map : rank.rows) {
      int64_t row = 0;
      for (size_t rows = in->GetCount(1); rows > 0; --rows) {
        row += in->GetSigned();
        if (row < -1 || row >= kNamedRowsMax) return false;
        map.Append(static_cast<int32_t>(row));
      }
    }
  }
  return in->ok();
}

}  // namespace bellwether::server
