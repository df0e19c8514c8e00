#include "server/ingest/own_values.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace bellwether::server {
namespace {

constexpr const char* kGranularityNames[] = {"?",      "run",  "head",   "key head", "layer",
                                             "expert", "rank", "tensor", "module",   "own"};
constexpr const char* kMergeNames[] = {"?", "sum", "max", "mean", "equal"};

std::string LimitText(const std::optional<double>& limit) { return limit ? absl::StrCat(*limit) : "none"; }

OwnSignal WithLimits(const OwnSignal& is, const OwnSignal& said) {
  OwnSignal now = is;
  if (said.low) now.low = said.low;
  if (said.high) now.high = said.high;
  return now;
}

// The one limit that `said` says does not go with the other one, as it was said before.
bool Crosses(const OwnSignal& is, const OwnSignal& said) {
  if (said.low.has_value() == said.high.has_value()) return false;
  const OwnSignal now = WithLimits(is, said);
  return now.low && now.high && *now.low > *now.high;
}

// What of `said` is not what the signal is, in words; "" = nothing.
std::string Disagreement(const OwnSignal& is, const OwnSignal& said) {
  if (said.granularity != is.granularity) {
    return absl::StrCat("granularity is ", kGranularityNames[static_cast<size_t>(said.granularity)], ", and was ",
                        kGranularityNames[static_cast<size_t>(is.granularity)], " before");
  }
  if (said.merge != is.merge) {
    return absl::StrCat("merge is ", kMergeNames[static_cast<size_t>(said.merge)], ", and was ",
                        kMergeNames[static_cast<size_t>(is.merge)], " before");
  }
  if (said.attempt > is.attempt) return {};
  if (!said.unit.empty() && !is.unit.empty() && said.unit != is.unit) {
    return absl::StrCat("unit is \"", said.unit, "\", and was \"", is.unit, "\" before");
  }
  const auto other = [](const std::optional<double>& a, const std::optional<double>& b) { return a && b && *a != *b; };
  if (other(said.low, is.low)) return absl::StrCat("low is ", *said.low, ", and was ", LimitText(is.low), " before");
  if (other(said.high, is.high))
    return absl::StrCat("high is ", *said.high, ", and was ", LimitText(is.high), " before");
  if (Crosses(is, said)) {
    const OwnSignal now = WithLimits(is, said);
    return absl::StrCat("low is ", *now.low, ", and high is ", *now.high, ": low must be at most high");
  }
  return {};
}

// What people read of it, in the words of `said` where it says something.
OwnSignal Adopted(const OwnSignal& is, const OwnSignal& said) {
  OwnSignal now = WithLimits(is, said);
  // In a later attempt: the other one is of the attempt before.
  if (Crosses(is, said)) (said.low ? now.high : now.low).reset();
  if (!said.unit.empty()) now.unit = said.unit;
  if (!said.help.empty() && (is.help.empty() || said.attempt > is.attempt)) now.help = said.help;
  return now;
}

bool SameWords(const OwnSignal& a, const OwnSignal& b) {
  return a.unit == b.unit && a.help == b.help && a.low == b.low && a.high == b.high;
}

uint64_t KeyOf(const OwnCell& cell) {
  return static_cast<uint64_t>(cell.signal) << 32 | static_cast<uint64_t>(cell.layer) << 16 |
         static_cast<uint64_t>(cell.head);
}

}  // namespace

const char* NameOf(OwnRefusal::Cause cause) {
  switch (cause) {
    case OwnRefusal::Cause::kCatalogue:
      return "catalogue";
    case OwnRefusal::Cause::kDisagrees:
      return "disagrees";
    case OwnRefusal::Cause::kSignals:
      return "signals";
    case OwnRefusal::Cause::kCells:
      return "cells";
  }
  return "";
}

RankFrame OwnRows::Translate(const RankFrame& frame, const RunRows& rows, std::optional<RunRows>* grown,
                             std::vector<OwnRefusal>* refused) {
  using Cause = OwnRefusal::Cause;
  RankFrame out = frame;
  out.own.clear();
  const auto now = [&]() -> const RunRows& { return grown->has_value() ? **grown : rows; };
  const auto growing = [&]() -> RunRows& { return grown->has_value() ? **grown : grown->emplace(rows); };
  for (const OwnBlock& block : frame.own) {
    const OwnSignal& said = block.signal;
    const auto refuse = [&](Cause cause, std::string why, uint64_t values) {
      refused->push_back({cause, said.name, std::move(why), values});
    };
    const OwnSignal* is = now().FindOwn(said.name);
    if (is == nullptr) {
      if (FindSignal(std::string_view(said.name)) != nullptr) {
        refuse(Cause::kCatalogue, "is the name of a signal of the catalogue: give it another name", block.count);
        continue;
      }
      if (now().own_signals.size() >= kOwnSignalsMax) {
        refuse(Cause::kSignals, absl::StrCat("is one too many: a run has at most ", kOwnSignalsMax, " own signals"),
               block.count);
        continue;
      }
      is = &growing().own_signals.emplace_back(said);
    } else if (std::string why = Disagreement(*is, said); !why.empty()) {
      refuse(Cause::kDisagrees, std::move(why), block.count);
      continue;
    } else if (OwnSignal adopted = Adopted(*is, said); !SameWords(adopted, *is)) {
      adopted.attempt = std::max(is->attempt, said.attempt);
      const auto index = static_cast<size_t>(is - now().own_signals.data());
      is = &(growing().own_signals[index] = std::move(adopted));
    }
    const bool columns = HasColumns(*is);
    const SignalId matrix = MatrixOf(*is);
    const auto index = static_cast<int32_t>(is - now().own_signals.data());
    uint64_t left_out = 0;
    RankBlock stretch{.signal = matrix, .head_count = 1};
    for (size_t i = 0; i < block.count; ++i) {
      const auto at = static_cast<int32_t>(i);
      const OwnCell cell{index, columns ? block.layer : block.layer + at, columns ? block.head + at : 0};
      auto [known, is_new] = known_.try_emplace(KeyOf(cell), -1);
      if (is_new) {
        const OwnSignal& signal = now().own_signals[static_cast<size_t>(index)];
        known->second = now().OwnRow(signal, cell.layer, cell.head);
        if (known->second < 0) known->second = growing().AddOwnCell(cell);
      }
      const int32_t row = known->second;
      if (row < 0) {
        known_.erase(known);
        ++left_out;
      }
      if (row >= 0 && stretch.layer_count > 0 && row == stretch.layer_begin + stretch.layer_count) {
        ++stretch.layer_count;
        continue;
      }
      if (stretch.layer_count > 0) out.blocks.push_back(stretch);
      stretch.layer_begin = row;
      stretch.layer_count = row < 0 ? 0 : 1;
      stretch.offset = block.offset + i;
    }
    if (stretch.layer_count > 0) out.blocks.push_back(stretch);
    if (left_out > 0) {
      refuse(Cause::kCells, absl::StrCat("has cells beyond the ", kNamedRowsMax, " that a run's own signals have"),
             left_out);
    }
  }
  return out;
}

}  // namespace bellwether::server
