#include "tests/bench/load_fleet.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <thread>

namespace bellwether {
namespace {

constexpr int kPacers = 4;
constexpr double kWelcomeSeconds = 60;

void SleepUntil(double when) { std::this_thread::sleep_for(std::chrono::duration<double>(when - BenchNow())); }

// A uuid for every run of this program.
int next_number = 1;

}  // namespace

LoadFleet::LoadFleet(const LoadServer* server, const EncodedFrames* frames, const std::string& tenant,
                     const std::string& name, int count)
    : server_(server), frames_(frames), tenant_(tenant), name_(name) {
  Add(count);
}

void LoadFleet::Add(int count) {
  for (int i = 0; i < count; ++i) {
    names_.push_back(name_ + "-" + std::to_string(names_.size()));
    trainers_.push_back(std::make_unique<LoadTrainer>(names_.back(), next_number++, frames_));
    trainers_.back()->Connect(server_->Connect(tenant_));
  }
  for (const double begin = BenchNow(); !AllWelcomed(); KeepConnected()) {
    if (BenchNow() > begin + kWelcomeSeconds) {
      std::string why;
      for (const auto& trainer : trainers_) {
        if (!trainer->welcomed()) why = trainer->error();
      }
      std::fprintf(stderr, "%s: not all of %zu were welcome within %.0f s: %s\n", name_.c_str(), trainers_.size(),
                   kWelcomeSeconds, why.c_str());
      std::exit(1);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void LoadFleet::Pace(double frames_per_second, double seconds, int nans) {
  const double begin = BenchNow();
  const auto total = static_cast<uint64_t>(frames_per_second * seconds);
  const size_t runs = trainers_.size();
  // Which frame of all is the NaN: of another run each, spread over the time.
  std::set<uint64_t> with_nan;
  for (int i = 0; i < nans && nans_sent_ < runs; ++i) {
    const auto at = static_cast<uint64_t>(static_cast<double>(total) * (i + 0.5) / nans);
    const uint64_t frame = at / runs * runs + nans_sent_;
    if (frame < total && with_nan.insert(frame).second) ++nans_sent_;
  }
  std::vector<std::thread> pacers;
  for (int pacer = 0; pacer < kPacers; ++pacer) {
    pacers.emplace_back([&, pacer] {
      for (uint64_t frame = 0; frame < total; ++frame) {
        if (frame % runs % kPacers != static_cast<uint64_t>(pacer)) continue;
        const double due = begin + static_cast<double>(frame) / frames_per_second;
        SleepUntil(due);
        trainers_[frame % runs]->Offer(1, due, with_nan.count(frame) != 0);
      }
    });
  }
  for (std::thread& pacer : pacers) pacer.join();
}

void LoadFleet::Backlog(uint64_t frames) { Offer(0, frames); }

void LoadFleet::Offer(int first, uint64_t frames) {
  for (size_t i = static_cast<size_t>(first); i < trainers_.size(); ++i) trainers_[i]->Offer(frames, BenchNow());
}

void LoadFleet::Saturate(uint64_t window) {
  for (const auto& trainer : trainers_) trainer->Saturate(window);
}

void LoadFleet::Cut() {
  for (const auto& trainer : trainers_) trainer->Cut();
}

void LoadFleet::KeepConnected() {
  for (const auto& trainer : trainers_) {
    if (!trainer->welcomed()) trainer->KeepConnected([this] { return server_->Connect(tenant_); });
  }
}

bool LoadFleet::AllWelcomed() const {
  return std::all_of(trainers_.begin(), trainers_.end(), [](const auto& trainer) { return trainer->welcomed(); });
}

bool LoadFleet::Drain(double seconds) {
  for (const double begin = BenchNow(); BenchNow() < begin + seconds; KeepConnected()) {
    if (acked() == offered()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

uint64_t LoadFleet::offered() const {
  uint64_t sum = 0;
  for (const auto& trainer : trainers_) sum += trainer->offered();
  return sum;
}

uint64_t LoadFleet::acked() const {
  uint64_t sum = 0;
  for (const auto& trainer : trainers_) sum += trainer->acked();
  return sum;
}

uint64_t LoadFleet::refused() const {
  uint64_t sum = 0;
  for (const auto& trainer : trainers_) sum += trainer->refused();
  return sum;
}

std::string LoadFleet::error() const {
  for (const auto& trainer : trainers_) {
    if (std::string error = trainer->error(); !error.empty()) return error;
  }
  return "";
}

std::vector<double> LoadFleet::TakeLatencies() {
  std::vector<double> latencies;
  for (const auto& trainer : trainers_) {
    for (const LoadTrainer::Acked& acked : trainer->TakeAcked()) latencies.push_back(acked.at - acked.due);
  }
  return latencies;
}

std::vector<double> LoadFleet::AlertLatencies(const AlertWatch& watch, double begin, double end, size_t* sent) const {
  const auto told_at = watch.told_at(nans_sent_);
  std::vector<double> latencies;
  *sent = 0;
  for (size_t i = 0; i < trainers_.size(); ++i) {
    const double due = trainers_[i]->nan_due();
    if (due < begin || due >= end) continue;
    ++*sent;
    const auto told = told_at.find(names_[i]);
    if (told != told_at.end()) latencies.push_back(told->second - due);
  }
  return latencies;
}

}  // namespace bellwether
