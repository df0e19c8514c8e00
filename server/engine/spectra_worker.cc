#include "server/engine/spectra_worker.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "server/detect/spectra.h"
#include "server/util/await_for.h"

namespace bellwether::server {
namespace {

constexpr absl::Duration kAskAgain = absl::Milliseconds(50);
constexpr int kNice = 10;

const char* ResultOf(GramAnswer::Outcome outcome) {
  switch (outcome) {
    case GramAnswer::Outcome::kComputed:
      return "computed";
    case GramAnswer::Outcome::kNonfinite:
      return "nonfinite";
    case GramAnswer::Outcome::kNotAGram:
      return "not_a_gram";
    case GramAnswer::Outcome::kDropped:
      break;
  }
  return "dropped";
}

}  // namespace

SpectraWorker::SpectraWorker(const Options& options, SpectraBank* bank, Counters* counters, const Clock* clock)
    : options_(options),
      bank_(bank != nullptr ? bank : CpuSpectraBank()),
      counters_(counters),
      clock_(clock),
      cpu_seconds_(counters->histogram("bellwether_spectra_seconds", {{"backend", "cpu"}})),
      cuda_seconds_(counters->histogram("bellwether_spectra_seconds", {{"backend", "cuda"}})),
      queue_bytes_gauge_(counters->gauge("bellwether_spectra_queue_bytes")) {
  for (const char* result : {"computed", "dropped"}) counter(result);  // Shown from the start.
}

SpectraWorker::~SpectraWorker() { Stop(); }

Counter* SpectraWorker::counter(const char* result) const {
  return counters_->counter("bellwether_spectra_total", {{"result", result}});
}

void SpectraWorker::Start(Sink sink) {
  sink_ = std::move(sink);
  thread_ = std::thread([this] { Loop(); });
}

void SpectraWorker::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void SpectraWorker::Submit(GramTask task) {
  const auto bytes = static_cast<int64_t>(task.bytes());
  absl::MutexLock lock(&mutex_);
  if (queue_bytes_ + bytes > options_.queue_bytes_max) {
    // Beyond that its step is closed by its deadline.
    if (dropped_.size() < options_.dropped_max) {
      dropped_.emplace_back(task.run, AnswerTo(task, GramAnswer::Outcome::kDropped));
    }
    return;
  }
  queue_bytes_ += bytes;
  queue_bytes_gauge_->Set(static_cast<double>(queue_bytes_));
  queue_.push_back(std::move(task));
}

void SpectraWorker::AwaitIdle() {
  absl::MutexLock lock(&mutex_);
  const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || (queue_.empty() && dropped_.empty() && !busy_);
  };
  mutex_.Await(absl::Condition(&idle));
}

void SpectraWorker::Loop() {
  // Where cores are few, whoever acknowledges or judges goes first.
  (void)setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNice);
  for (;;) {
    std::vector<GramTask> tasks;
    Answers answers;
    {
      absl::MutexLock lock(&mutex_);
      busy_ = false;
      const auto wake = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return !queue_.empty() || !dropped_.empty() || stopping_;
      };
      mutex_.Await(absl::Condition(&wake));
      if (stopping_) return;
      busy_ = true;
      int64_t bytes = 0;
      while (!queue_.empty()) {
        const auto next = static_cast<int64_t>(queue_.front().bytes());
        if (!tasks.empty() && bytes + next > options_.batch_bytes_max) break;
        bytes += next;
        tasks.push_back(std::move(queue_.front()));
        queue_.pop_front();
      }
      queue_bytes_ -= bytes;
      queue_bytes_gauge_->Set(static_cast<double>(queue_bytes_));
      for (auto& [run, answer] : dropped_) answers[run].answers.push_back(answer);
      dropped_.clear();
    }
    Solve(tasks, &answers);
    if (!Deliver(answers)) return;
  }
}

void SpectraWorker::Solve(const std::vector<GramTask>& tasks, Answers* answers) {
  if (!tasks.empty()) {
    const int64_t begin = clock_->MonotonicNanos();
    const std::vector<GramAnswer> solved = SolveGrams(tasks, bank_);
    const auto passed = static_cast<double>(clock_->MonotonicNanos() - begin);
    (std::strcmp(bank_->backend(), "cpu") == 0 ? cpu_seconds_ : cuda_seconds_)->Observe(passed * 1e-9);
    for (size_t i = 0; i < tasks.size(); ++i) (*answers)[tasks[i].run].answers.push_back(solved[i]);
  }
  for (const auto& [run, message] : *answers) {
    for (const GramAnswer& answer : message.answers) counter(ResultOf(answer.outcome))->Add();
  }
}

bool SpectraWorker::Deliver(const Answers& answers) {
  for (const auto& [run, message] : answers) {
    while (!sink_(run, message)) {
      absl::MutexLock lock(&mutex_);
      if (AwaitFor(&mutex_, absl::Condition(&stopping_), kAskAgain)) return false;
    }
  }
  return true;
}

}  // namespace bellwether::server
