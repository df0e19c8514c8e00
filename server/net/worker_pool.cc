#include "server/net/worker_pool.h"

#include <utility>

namespace bellwether::server {

bool WorkerPool::Enqueue(std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  // Idle threads take theirs: those do not wait.
  if (stopping_ || tasks_.size() >= queue_max_ + idle_ + (threads_max_ - threads_.size())) return false;
  tasks_.push_back(std::move(task));
  if (tasks_.size() > idle_ && threads_.size() < threads_max_) threads_.emplace_back([this] { Work(); });
  return true;
}

void WorkerPool::Shutdown() {
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

size_t WorkerPool::threads() const {
  absl::MutexLock lock(&mutex_);
  return threads_.size();
}

void WorkerPool::Work() {
  for (;;) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mutex_);
      const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !tasks_.empty() || stopping_; };
      ++idle_;
      mutex_.Await(absl::Condition(&has_work));
      --idle_;
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace bellwether::server
