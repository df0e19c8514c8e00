// counters.h: what the server counts of itself.
//
// A part that counts owns nothing: it asks for a counter by metric name and
// labels at start and adds to it.  The exporter lists them all.  Names must be
// in export/metrics_catalog.h (a test compares).  Thread-safe; Add() and
// Observe() are a few atomic operations.

#ifndef BELLWETHER_SERVER_UTIL_COUNTERS_H_
#define BELLWETHER_SERVER_UTIL_COUNTERS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"

namespace bellwether::server {

class Counter {
 public:
  void Add(double by = 1) { value_.fetch_add(by, std::memory_order_relaxed); }
  double value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_ = 0;
};

class Gauge {
 public:
  void Set(double value) { value_.store(value, std::memory_order_relaxed); }
  void Add(double by) { value_.fetch_add(by, std::memory_order_relaxed); }
  double value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_ = 0;
};

class Histogram {
 public:
  static constexpr size_t kBucketsMax = 12;
  explicit Histogram(std::vector<double> bounds);  // Rising, <= 12.
  void Observe(double value);
  const std::vector<double>& bounds() const { return bounds_; }
  // Not cumulative; one more than bounds, the last is +inf.
  std::vector<uint64_t> counts() const;
  double sum() const { return sum_.load(std::memory_order_relaxed); }

 private:
  const std::vector<double> bounds_;
  std::array<std::atomic<uint64_t>, kBucketsMax + 1> counts_{};
  std::atomic<double> sum_ = 0;
};

using Labels = std::vector<std::pair<std::string, std::string>>;

class Counters {
 public:
  // The same object for the same name and labels; lives as long as this.
  Counter* counter(const std::string& name, const Labels& labels = {});
  Gauge* gauge(const std::string& name, const Labels& labels = {});
  // Seconds, from 100 us to 10 s, unless bounds are given at first use.
  Histogram* histogram(const std::string& name, const Labels& labels = {}, std::vector<double> bounds = {});

  struct Entry {
    std::string name;
    Labels labels;
    const Counter* counter = nullptr;  // One of the three.
    const Gauge* gauge = nullptr;
    const Histogram* histogram = nullptr;
  };
  std::vector<Entry> List() const;  // By name, then labels.

 private:
  using Key = std::pair<std::string, Labels>;
  mutable absl::Mutex mutex_;
  std::map<Key, std::unique_ptr<Counter>> counters_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, std::unique_ptr<Gauge>> gauges_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, std::unique_ptr<Histogram>> histograms_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_COUNTERS_H_
