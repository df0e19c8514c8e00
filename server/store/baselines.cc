#include "server/store/baselines.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "server/store/record_codec.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

bool IsBefore(const Band& a, const Band& b) {
  return std::tuple(a.signal, a.own, a.range) < std::tuple(b.signal, b.own, b.range);
}

}  // namespace

const Band* FindBand(const BaselinePercentiles& run, SignalId signal, int range, std::string_view own) {
  Band wanted{.signal = signal, .range = static_cast<uint8_t>(range)};
  if (!own.empty()) {
    const auto named = std::find(run.own.begin(), run.own.end(), own);
    if (named == run.own.end()) return nullptr;
    wanted.own = static_cast<uint16_t>(1 + (named - run.own.begin()));
  }
  const auto found = std::lower_bound(run.bands.begin(), run.bands.end(), wanted, IsBefore);
  return found == run.bands.end() || IsBefore(wanted, *found) ? nullptr : &*found;
}

Baselines::Baselines(const Options& options, Database* database, Counters* counters)
    : options_(options),
      database_(database),
      counters_(counters),
      runs_gauge_(counters->gauge("bellwether_baseline_runs")) {}

absl::Status Baselines::Load() {
  BW_ASSIGN_OR_RETURN(const std::vector<Database::BandsRow> rows, database_->ListBands());
  for (const Database::BandsRow& row : rows) {
    absl::StatusOr<BaselinePercentiles> bands = DecodeBaselinePercentiles(row.row);
    const bool whole =
        bands.ok() && bands->run == row.run && std::is_sorted(bands->bands.begin(), bands->bands.end(), IsBefore) &&
        std::all_of(bands->bands.begin(), bands->bands.end(),
                    [&](const Band& band) { return band.range < kBandRanges && band.own <= bands->own.size(); });
    if (!whole) {
      LogWarning("the bands of run number {} cannot be read and are learned again", row.run);
      BW_RETURN_IF_ERROR(database_->DeleteBands(row.run));
      continue;
    }
    absl::MutexLock lock(&mutex_);
    auto kept = std::make_shared<const BaselinePercentiles>(*std::move(bands));
    kinds_[kept->kind][kept->run] = kept;
    runs_[kept->run] = std::move(kept);
    runs_gauge_->Set(static_cast<double>(runs_.size()));
  }
  return absl::OkStatus();
}

RunId Baselines::Surplus(RunId run, const std::string& kind, const char** limit) const {
  const auto known = runs_.find(run);
  if (known != runs_.end() && known->second->kind == kind) return 0;  // It is replaced.
  const auto of_kind = kinds_.find(kind);
  if (of_kind != kinds_.end() && of_kind->second.size() >= options_.runs_per_kind_max) {
    *limit = "runs_per_kind";
    return std::min(run, of_kind->second.begin()->first);
  }
  if (runs_.size() >= options_.runs_max && known == runs_.end()) {
    *limit = "runs";
    return std::min(run, runs_.begin()->first);
  }
  return 0;
}

bool Baselines::HasRoomFor(RunId run, const std::string& kind) const {
  absl::MutexLock lock(&mutex_);
  const char* limit = nullptr;
  return Surplus(run, kind, &limit) != run;
}

void Baselines::Drop(RunId run) {
  const auto found = runs_.find(run);
  if (found == runs_.end()) return;
  const auto of_kind = kinds_.find(found->second->kind);
  of_kind->second.erase(run);
  if (of_kind->second.empty()) kinds_.erase(of_kind);
  runs_.erase(found);
}

absl::Status Baselines::Put(BaselinePercentiles bands) {
  std::sort(bands.bands.begin(), bands.bands.end(), IsBefore);
  auto kept = std::make_shared<const BaselinePercentiles>(std::move(bands));
  absl::MutexLock change(&change_mutex_);
  const char* limit = nullptr;
  RunId surplus = 0;
  {
    absl::MutexLock lock(&mutex_);
    surplus = Surplus(kept->run, kept->kind, &limit);
  }
  if (surplus != 0) {  // Perhaps the run itself, as what it was before.
    counters_->counter("bellwether_baseline_limit_refused_total", {{"limit", limit}})->Add();
    BW_RETURN_IF_ERROR(database_->DeleteBands(surplus));
    absl::MutexLock lock(&mutex_);
    Drop(surplus);
  }
  if (surplus == kept->run) return absl::OkStatus();
  BW_RETURN_IF_ERROR(database_->PutBands(kept->run, EncodeBaselinePercentiles(*kept)));
  absl::MutexLock lock(&mutex_);
  Drop(kept->run);  // It may have been of another kind.
  kinds_[kept->kind][kept->run] = kept;
  runs_[kept->run] = std::move(kept);
  runs_gauge_->Set(static_cast<double>(runs_.size()));
  return absl::OkStatus();
}

absl::Status Baselines::Remove(RunId run) {
  absl::MutexLock change(&change_mutex_);
  if (Get(run) == nullptr) return absl::OkStatus();
  BW_RETURN_IF_ERROR(database_->DeleteBands(run));
  absl::MutexLock lock(&mutex_);
  Drop(run);
  runs_gauge_->Set(static_cast<double>(runs_.size()));
  return absl::OkStatus();
}

std::shared_ptr<const BaselinePercentiles> Baselines::Get(RunId run) const {
  absl::MutexLock lock(&mutex_);
  const auto found = runs_.find(run);
  return found == runs_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<const BaselinePercentiles>> Baselines::Siblings(const std::string& kind,
                                                                            RunId except) const {
  absl::MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<const BaselinePercentiles>> siblings;
  const auto of_kind = kinds_.find(kind);
  if (of_kind == kinds_.end()) return siblings;
  for (auto run = of_kind->second.rbegin(); run != of_kind->second.rend(); ++run) {
    if (run->first != except) siblings.push_back(run->second);
  }
  return siblings;
}

std::vector<std::vector<std::shared_ptr<const BaselinePercentiles>>> Baselines::List() const {
  std::vector<std::vector<std::shared_ptr<const BaselinePercentiles>>> kinds;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [kind, runs] : kinds_) {
      auto& listed = kinds.emplace_back();
      for (auto run = runs.rbegin(); run != runs.rend(); ++run) listed.push_back(run->second);
    }
  }
  std::stable_sort(kinds.begin(), kinds.end(), [](const auto& a, const auto& b) { return a.size() > b.size(); });
  return kinds;
}

SiblingBand Baselines::Find(const std::string& kind, RunId except, SignalId signal, int64_t step,
                            std::string_view own) const {
  const auto siblings = Siblings(kind, except);  // Keeps the bands alive.
  const int range = BandRangeOf(std::max<int64_t>(step, 0));
  std::vector<const Band*> bands;
  for (const auto& run : siblings) {
    if (const Band* const band = FindBand(*run, signal, range, own)) bands.push_back(band);
  }
  return MergeBands(bands);
}

}  // namespace bellwether::server
