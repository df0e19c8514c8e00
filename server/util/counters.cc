#include "server/util/counters.h"

#include <algorithm>

namespace bellwether::server {
namespace {

template <typename T, typename Make>
T* FindOrMake(std::map<std::pair<std::string, Labels>, std::unique_ptr<T>>* map, const std::string& name,
              const Labels& labels, Make make) {
  std::unique_ptr<T>& entry = (*map)[{name, labels}];
  if (entry == nullptr) entry = make();
  return entry.get();
}

}  // namespace

Histogram::Histogram(std::vector<double> bounds) : bounds_(std::move(bounds)) {}

void Histogram::Observe(double value) {
  const size_t bucket = static_cast<size_t>(std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin());
  counts_[bucket].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
}

std::vector<uint64_t> Histogram::counts() const {
  std::vector<uint64_t> counts(bounds_.size() + 1);
  for (size_t i = 0; i < counts.size(); ++i) counts[i] = counts_[i].load(std::memory_order_relaxed);
  return counts;
}

Counter* Counters::counter(const std::string& name, const Labels& labels) {
  absl::MutexLock lock(&mutex_);
  return FindOrMake(&counters_, name, labels, [] { return std::make_unique<Counter>(); });
}

Gauge* Counters::gauge(const std::string& name, const Labels& labels) {
  absl::MutexLock lock(&mutex_);
  return FindOrMake(&gauges_, name, labels, [] { return std::make_unique<Gauge>(); });
}

Histogram* Counters::histogram(const std::string& name, const Labels& labels, std::vector<double> bounds) {
  if (bounds.empty()) bounds = {1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.5, 2, 10};
  absl::MutexLock lock(&mutex_);
  return FindOrMake(&histograms_, name, labels, [&] { return std::make_unique<Histogram>(std::move(bounds)); });
}

std::vector<Counters::Entry> Counters::List() const {
  absl::MutexLock lock(&mutex_);
  std::vector<Entry> entries;
  for (const auto& [key, counter] : counters_) entries.push_back({key.first, key.second, counter.get()});
  for (const auto& [key, gauge] : gauges_) entries.push_back({key.first, key.second, nullptr, gauge.get()});
  for (const auto& [key, histogram] : histograms_) {
    entries.push_back({key.first, key.second, nullptr, nullptr, histogram.get()});
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return std::tie(a.name, a.labels) < std::tie(b.name, b.labels); });
  return entries;
}

}  // namespace bellwether::server
