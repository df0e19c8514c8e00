#include "server/run_saver.h"

#include <utility>

namespace bellwether::server {

RunSaver::RunSaver(int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

RunSaver::~RunSaver() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void RunSaver::Do(std::function<void()> wait) {
  absl::MutexLock lock(&mutex_);
  waiting_.push_back(std::move(wait));
}

void RunSaver::Work() {
  for (;;) {
    std::function<void()> wait;
    {
      absl::MutexLock lock(&mutex_);
      const auto wake = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_ || !waiting_.empty(); };
      mutex_.Await(absl::Condition(&wake));
      if (waiting_.empty()) return;
      wait = std::move(waiting_.front());
      waiting_.pop_front();
    }
    wait();
  }
}

}  // namespace bellwether::server
