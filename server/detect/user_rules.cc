#include "server/detect/user_rules.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/head_tests.h"
#include "server/detect/multiplicity.h"
#include "server/detect/rule_fields.h"
#include "server/model/alert_words.h"
#include "server/util/glob.h"

namespace bellwether::server {
namespace {

constexpr double kNoReading = std::numeric_limits<double>::quiet_NaN();

// Rounding needs low-precision scores; centred keys carry no common mode.
bool RoundingPossible(const AttentionTraits& traits) { return traits.score_dtype != "fp32" && !traits.centred; }

double ToScale(const UserRule& rule, double value) {
  if (rule.scale == RuleScale::kLinear) return value;
  return value > 0 ? std::log(value) : kNoReading;
}
double FromScale(const UserRule& rule, double value) {
  return rule.scale == RuleScale::kLinear ? value : std::exp(value);
}

// Rows of the window that the rule looks back on.
int32_t WindowOf(const UserRule& rule) {
  switch (rule.detector) {
    case RuleDetector::kGrowth:
      return kWindowBatchesMax;
    case RuleDetector::kImpulse:
    case RuleDetector::kCusum:
      return 1;  // Whether a cell was measured in this batch.
    case RuleDetector::kLevel:
    case RuleDetector::kPeers:
      break;
  }
  return 0;
}

}  // namespace

UserRules::UserRules(const JudgeOptions& options, const Layout& layout)
    : options_(options), layout_(layout), memories_(options.rules == nullptr ? 0 : options.rules->size()) {
  for (size_t i = 0; i < memories_.size(); ++i) {
    const size_t cells = CellsOf(rule(i).scope);
    if (rule(i).detector == RuleDetector::kCusum)
      memories_[i].cusum.emplace(cells, CusumBank::Options{.window = rule(i).window_batches});
    if (rule(i).detector == RuleDetector::kImpulse)
      memories_[i].impulse.emplace(cells, ImpulseBank::Options{.window = rule(i).window_batches});
    SetBankOptions(i);
    AddTrack(i);
  }
}

void UserRules::SetBankOptions(size_t index) {
  const UserRule& r = rule(index);
  if (memories_[index].cusum) {
    memories_[index].cusum->SetOptions(
        {.k = r.k, .h = r.h, .window = r.window_batches, .relearn = r.relearn_batches, .direction = r.direction});
  }
  if (memories_[index].impulse) {
    memories_[index].impulse->SetOptions(
        {.sigmas = r.sigmas, .window = r.window_batches, .relearn = r.relearn_batches, .direction = r.direction});
  }
}

void UserRules::AddTrack(size_t index) {
  const UserRule& r = rule(index);
  const auto found = std::find_if(tracks_.begin(), tracks_.end(), [&](const Track& t) { return t.SameSeries(r); });
  if (found != tracks_.end()) {
    found->rules.push_back(index);
    found->window = std::max(found->window, WindowOf(r));
    found->series.SetWindow(found->window);
    return;
  }
  const size_t cells = CellsOf(r.scope);
  tracks_.push_back({.signal = r.signal,
                     .own = r.own,
                     .scope = r.scope,
                     .aggregate = r.aggregate,
                     .rows = r.rows,
                     .batch_steps = r.batch_steps,
                     .cells = cells,
                     .window = WindowOf(r),
                     .series = BatchSeries(cells, WindowOf(r)),
                     .rules = {index}});
}

size_t UserRules::CellsOf(RuleScope scope) const {
  switch (scope) {
    case RuleScope::kHead:
      return static_cast<size_t>(layout_.layers) * static_cast<size_t>(layout_.heads);
    case RuleScope::kLayer:
      return static_cast<size_t>(layout_.layers);
    case RuleScope::kRow:
      return static_cast<size_t>(kRuleRowsMax);
    case RuleScope::kRun:
      break;
  }
  return 1;
}

Head UserRules::At(RuleScope scope, size_t cell) const {
  const auto at = static_cast<int32_t>(cell);
  if (scope == RuleScope::kHead) return {at / layout_.heads, at % layout_.heads};
  if (scope == RuleScope::kLayer) return {at, -1};
  return {};
}

float UserRules::Aggregate(RuleAggregate how, size_t begin, size_t end) {
  const std::span<const float> heads = std::span<const float>(matrix_).subspan(begin, end - begin);
  if (how == RuleAggregate::kMedian) {
    scratch_.resize(heads.size());
    return kernels::LowerMedian(heads.data(), static_cast<int64_t>(heads.size()), scratch_.data());
  }
  float result = std::numeric_limits<float>::quiet_NaN();
  int found = 0;
  for (const float value : heads) {
    if (!std::isfinite(value)) continue;
    ++found;
    result = found == 1                   ? value
             : how == RuleAggregate::kMax ? std::max(result, value)
             : how == RuleAggregate::kMin ? std::min(result, value)
                                          : result + value;
  }
  return how == RuleAggregate::kMean && found > 0 ? result / static_cast<float>(found) : result;
}

void UserRules::ReadNames(Track* track) const {
  if (rows_ == nullptr) return;
  const RowNames& names = rows_->of(FindSignal(track->signal)->granularity);
  const int32_t room = track->scope == RuleScope::kRow ? kRuleRowsMax : kNamedRowsMax;
  for (; track->names_read < names.size(); ++track->names_read) {
    const auto row = static_cast<size_t>(track->names_read);
    if (!track->own.empty()) {
      const OwnCell& cell = rows_->own_cells[row];
      if (rows_->own_signals[static_cast<size_t>(cell.signal)].name != track->own) continue;
    }
    if (!GlobMatches(track->rows, names.names()[row])) continue;
    if (static_cast<int32_t>(track->fitting.size()) < room) {
      track->fitting.push_back(track->names_read);
    } else {
      ++track->left_out;
    }
  }
}

std::string UserRules::NameOfRow(const Track& track, size_t cell) const {
  const Granularity granularity = FindSignal(track.signal)->granularity;
  if (rows_ == nullptr || !OfNamedRows(granularity)) return {};
  const bool each = track.scope == RuleScope::kRow;
  if (each && cell >= track.fitting.size()) return {};
  const int32_t row = each ? track.fitting[cell] : track.row;
  const RowNames& names = rows_->of(granularity);
  return row >= 0 && row < names.size() ? names.names()[static_cast<size_t>(row)] : std::string();
}

bool UserRules::Extract(const StepSample& sample, Track* into) {
  Track& track = *into;
  SignalId matrix = track.signal;
  if (!track.own.empty()) {
    const OwnSignal* const own = rows_ == nullptr ? nullptr : rows_->FindOwn(track.own);
    if (own == nullptr) return false;
    matrix = MatrixOf(*own);
  }
  if (!DeriveMatrix(sample, *FindSignal(matrix), &matrix_)) return false;
  values_.resize(track.cells);
  const bool of_rows = OfNamedRows(FindSignal(track.signal)->granularity);
  if (of_rows) ReadNames(&track);
  if (of_rows && (track.scope == RuleScope::kRow || track.rows != UserRule().rows || !track.own.empty())) {
    // What fits, in the order of its cells; the cells behind are empty.
    values_.assign(std::max(track.cells, track.fitting.size()), NotMeasured());
    for (size_t i = 0; i < track.fitting.size(); ++i) {
      const auto row = static_cast<size_t>(track.fitting[i]);
      if (row < matrix_.size()) values_[i] = matrix_[row];
    }
    if (track.scope == RuleScope::kRow) return true;
    matrix_ = values_;
    values_.assign(1, Aggregate(track.aggregate, 0, matrix_.size()));
    const auto found = std::find(matrix_.begin(), matrix_.end(), values_[0]);
    if (found != matrix_.end()) track.row = track.fitting[static_cast<size_t>(found - matrix_.begin())];
  } else if (track.scope == RuleScope::kHead) {
    // A key head speaks for the heads that share it.
    const size_t group = track.cells / matrix_.size();
    for (size_t i = 0; i < track.cells; ++i) values_[i] = matrix_[i / group];
  } else {
    const size_t each = matrix_.size() / track.cells;
    for (size_t i = 0; i < track.cells; ++i) values_[i] = Aggregate(track.aggregate, i * each, (i + 1) * each);
    if (track.cells == 1) {
      const auto row = std::find(matrix_.begin(), matrix_.end(), values_[0]);
      if (row != matrix_.end()) track.row = static_cast<int32_t>(row - matrix_.begin());
    }
  }
  return true;
}

void UserRules::Observe(const StepSample& sample, const AttentionTraits& traits, bool excused, const Found& found) {
  for (Track& track : tracks_) {
    if (!Extract(sample, &track)) continue;
    track.series.Add(values_);
    const int64_t gap = track.last_step < 0 ? 0 : sample.step - track.last_step;
    track.last_step = sample.step;
    if (track.batch_begin < 0) track.batch_begin = sample.step;
    // Full if a further sample at this pace would lie beyond the batch.
    if (sample.step - track.batch_begin + std::max<int64_t>(gap, 1) < track.batch_steps) continue;
    track.batch_begin = -1;
    const bool measured = track.series.Close(sample.step);
    // What the first steps do is no past to go by.
    if (sample.step < options_.context.warmup_steps) track.series.ForgetWindow();
    if (excused || !measured) continue;
    for (const size_t index : track.rules) {
      findings_.clear();
      if (!rule(index).rounding_only || RoundingPossible(traits)) Judge(index, track, &findings_);
      found(index, &findings_);
    }
  }
}

void UserRules::Judge(size_t index, const Track& track, std::vector<Finding>* findings) {
  const UserRule& r = rule(index);
  Memory& memory = memories_[index];
  if (memory.count.empty()) {
    memory.count.assign(track.cells, 0);
    memory.active.assign(track.cells, 0);
    memory.since.assign(track.cells, 0);
  }
  readings_.assign(track.cells, Reading());
  switch (r.detector) {
    case RuleDetector::kLevel:
      ReadLevel(r, track);
      break;
    case RuleDetector::kPeers:
      ReadPeers(r, track);
      break;
    case RuleDetector::kGrowth:
      ReadGrowth(r, track);
      break;
    case RuleDetector::kImpulse:
    case RuleDetector::kCusum:
      ReadBank(r, track, &memory);
      break;
  }
  double p_max = 1;
  if (r.benjamini_hochberg) {
    p_.clear();
    for (const Reading& reading : readings_) {
      if (reading.known) p_.push_back(reading.p);
    }
    p_max = BenjaminiHochberg(p_, *r.benjamini_hochberg, &p_scratch_);
  }
  std::vector<std::string> names;
  for (size_t cell = 0; cell < track.cells; ++cell) {
    Reading& reading = readings_[cell];
    reading.fires = reading.fires && reading.p <= p_max;
    const bool active =
        reading.known ? Hold(&memory, cell, reading.fires, r.hold_batches, track.last_step) : memory.active[cell] != 0;
    if (!active) continue;
    findings->push_back(FindingOf(r, track, memory, cell));
    if (r.scope == RuleScope::kRow) names.push_back(NameOfRow(track, cell));
  }
  if (names.size() > 1) NameOthers(names, findings);
}

void UserRules::NameOthers(const std::vector<std::string>& names, std::vector<Finding>* findings) {
  constexpr size_t kSaidMax = 4;
  const auto worst = std::max_element(findings->begin(), findings->end(),
                                      [](const Finding& a, const Finding& b) { return a.score < b.score; });
  const auto at = static_cast<size_t>(worst - findings->begin());
  size_t said = 0;
  for (size_t i = 0; i < names.size() && said < kSaidMax; ++i) {
    if (i == at) continue;
    absl::StrAppend(&worst->summary, said++ == 0 ? "; also of " : ", ", names[i]);
  }
  if (said + 1 < names.size()) absl::StrAppend(&worst->summary, " and ", names.size() - 1 - said, " more");
}

bool UserRules::Hold(Memory* memory, size_t cell, bool fires, int32_t hold, int64_t step) const {
  uint16_t& n = memory->count[cell];
  if (fires) {
    if (n == 0) memory->since[cell] = step;
    n = static_cast<uint16_t>(std::min(n + 1, 2 * hold));
    if (n >= hold) memory->active[cell] = 1;
  } else if (n > 0 && --n == 0) {
    memory->active[cell] = 0;
  }
  return memory->active[cell] != 0;
}

Finding UserRules::FindingOf(const UserRule& r, const Track& track, const Memory& memory, size_t cell) const {
  const Reading& reading = readings_[cell];
  Finding finding;
  finding.rule = Rule::kUser;
  finding.severity = r.severity;
  finding.stage = r.stage;
  finding.where = At(r.scope, cell);
  finding.score = reading.score;
  finding.first_step = memory.since[cell];
  finding.eta = reading.eta;
  const std::string name = NameOfRow(track, cell);
  const char* const signal = SignalNameOf(r);
  // The name of a cell begins with that of its signal.
  const std::string subject = r.own.empty() ? absl::StrCat(signal, " of ", name) : name;
  // What holds on while its newest value has fallen back is no evidence to show.
  if (!reading.fires) {
    if (r.scope == RuleScope::kRow) {
      finding.summary = absl::StrCat(r.name, ": ", subject, ", since step ", CountText(memory.since[cell]));
    }
    return finding;
  }
  finding.Add({.signal = signal,
               .where = finding.where,
               .value = reading.value,
               .threshold = reading.threshold,
               .baseline = reading.baseline,
               .first_step = memory.since[cell],
               .detector = NameOf(r.detector)});
  if (r.detector == RuleDetector::kGrowth) {
    finding.note = absl::StrFormat("doubles every %.0f steps: z %.1f, r2 %.2f", reading.trend.doubling_steps(),
                                   reading.trend.z, reading.trend.r2);
  } else if (r.detector == RuleDetector::kCusum) {
    finding.note = absl::StrFormat("sum %.1f, which fires above %.4g", reading.score, r.h);
  } else if (r.detector == RuleDetector::kImpulse) {
    finding.note = absl::StrFormat("%.1f standard deviations off", reading.score);
  }
  if (!name.empty()) {
    finding.note = finding.note.empty() ? name : absl::StrCat(name, ": ", finding.note);
    finding.summary = absl::StrCat(r.name, ": ", subject, " ", ValueText(reading.value), " (limit ",
                                   ValueText(reading.threshold), "), since step ", CountText(memory.since[cell]));
  }
  return finding;
}

void UserRules::ReadLevel(const UserRule& r, const Track& track) {
  for (size_t cell = 0; cell < track.cells; ++cell) {
    Reading& reading = readings_[cell];
    reading.value = track.series.newest(cell);
    reading.known = std::isfinite(reading.value);
    reading.baseline = track.cells > 1 ? track.series.median() : kNoReading;
    reading.threshold = r.above ? *r.above : *r.below;
    reading.fires = r.above ? reading.value > *r.above : reading.value < *r.below;
    reading.score = r.above ? reading.value : -reading.value;
  }
}

void UserRules::ReadPeers(const UserRule& r, const Track& track) {
  const auto values = track.series.newest();
  const auto peers = std::count_if(values.begin(), values.end(), [](float value) { return std::isfinite(value); });
  const double median = std::max<double>(track.series.median(), r.floor);
  for (size_t cell = 0; cell < track.cells; ++cell) {
    Reading& reading = readings_[cell];
    reading.value = values[cell];
    reading.known = std::isfinite(reading.value) && peers >= options_.drift.peers_min && median > 0;
    reading.baseline = median;
    reading.threshold = r.factor * median;
    const bool high = r.factor > 1;
    reading.fires = reading.known && (high ? reading.value > reading.threshold : reading.value < reading.threshold);
    reading.score = (high ? reading.value : -reading.value) / median;
  }
}

void UserRules::ReadGrowth(const UserRule& r, const Track& track) {
  TrendOptions asked = options_.trend;
  asked.mann_kendall_z_min = r.z_min;
  asked.r2_min = r.r2_min;
  asked.doubling_steps_max = r.doubling_steps_max;
  kernels::BankTest test;
  AskForGrowth(asked, track.series, &test);
  const kernels::BankTrack series = track.series.Track();
  for (size_t cell = 0; cell < track.cells; ++cell) {
    Reading& reading = readings_[cell];
    reading.value = track.series.newest(cell);
    reading.known = std::isfinite(reading.value);
    reading.baseline = track.cells > 1 ? track.series.median() : kNoReading;
    reading.threshold = r.above.value_or(0);
    if (!reading.known || (r.above && !(reading.value > *r.above))) continue;
    Trend trend;
    reading.fires =
        kernels::PassesWindows(test, series, static_cast<int64_t>(track.cells), static_cast<int64_t>(cell), &trend);
    if (!reading.fires) continue;
    reading.trend = trend;
    reading.score = 1 / reading.trend.doubling_steps();
    reading.p = NormalTail(reading.trend.z);
    if (r.eta_level) reading.eta = EtaTo(reading.trend, *r.eta_level, options_.drift.eta_steps_max);
  }
}

void UserRules::ReadBank(const UserRule& r, const Track& track, Memory* memory) {
  for (size_t cell = 0; cell < track.cells; ++cell) {
    Reading& reading = readings_[cell];
    track.series.Window(cell, 1, false, &window_, &steps_);
    reading.value = window_.front();
    const double scaled = ToScale(r, reading.value);
    const BankReading said =
        memory->cusum ? memory->cusum->Update(cell, scaled) : memory->impulse->Update(cell, scaled);
    reading.known = said.scored;
    if (!said.scored) continue;
    reading.fires = said.alarm;
    reading.score = said.score;
    reading.p = said.p;
    reading.baseline = FromScale(r, said.mean);
    // The value beyond which an impulse fires, or a sum grows.
    const double off = (memory->cusum ? r.k : r.sigmas) * said.deviation;
    reading.threshold = FromScale(r, said.mean + (scaled < said.mean ? -off : off));
  }
}

void UserRules::Forget() {
  for (Track& track : tracks_) {
    track.series.ForgetWindow();
    track.batch_begin = track.last_step = -1;
  }
  for (Memory& memory : memories_) {
    std::fill(memory.count.begin(), memory.count.end(), uint16_t{0});
    std::fill(memory.active.begin(), memory.active.end(), uint8_t{0});
  }
  Excuse();
}

void UserRules::Excuse() {
  for (Memory& memory : memories_) {
    if (memory.cusum) memory.cusum->ForgetAll();
    if (memory.impulse) memory.impulse->ForgetAll();
  }
}

std::vector<int> UserRules::TakeOver(UserRules* old) {
  for (Track& track : tracks_) {
    for (Track& before : old->tracks_) {
      if (!before.SameSeries(rule(track.rules.front()))) continue;
      track.series = std::move(before.series);
      track.series.SetWindow(track.window);
      track.batch_begin = before.batch_begin;
      track.last_step = before.last_step;
    }
  }
  std::vector<int> from(size(), -1);
  for (size_t i = 0; i < size(); ++i) {
    for (size_t j = 0; j < old->size(); ++j) {
      if (!rule(i).RemembersLike(old->rule(j))) continue;
      memories_[i] = std::move(old->memories_[j]);
      SetBankOptions(i);
      from[i] = static_cast<int>(j);
    }
  }
  return from;
}

uint64_t UserRules::rows_left_out() const {
  uint64_t rows = 0;
  for (const Track& track : tracks_) rows += track.left_out;
  return rows;
}

size_t UserRules::memory_bytes() const {
  size_t bytes = 0;
  for (const Track& track : tracks_) bytes += sizeof track + track.series.memory_bytes();
  for (const Memory& memory : memories_) {
    bytes += sizeof memory + memory.count.capacity() * sizeof(uint16_t) + memory.active.capacity() +
             memory.since.capacity() * sizeof(int64_t);
    if (memory.cusum) bytes += memory.cusum->memory_bytes();
    if (memory.impulse) bytes += memory.impulse->memory_bytes();
  }
  return bytes;
}

bool UserRules::Consistent() const {
  for (const Track& track : tracks_) {
    if (!track.series.Consistent()) return false;
  }
  for (size_t i = 0; i < size(); ++i) {
    const Memory& memory = memories_[i];
    const size_t cells = memory.count.size();
    if ((cells != 0 && cells != CellsOf(rule(i).scope)) || memory.active.size() != cells ||
        memory.since.size() != cells)
      return false;
    if (memory.cusum && !memory.cusum->Consistent()) return false;
    if (memory.impulse && !memory.impulse->Consistent()) return false;
  }
  return true;
}

}  // namespace bellwether::server
