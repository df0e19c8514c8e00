#include "server/query/stream_feeder.h"

#include <algorithm>
#include <utility>

#include "absl/time/time.h"
#include "server/util/await_for.h"

namespace bellwether::server {

grpc::Status GoingDown() { return {grpc::StatusCode::UNAVAILABLE, "the server is going down"}; }

StreamFeeder::StreamFeeder(Clock* clock) : clock_(clock), thread_([this] { Run(); }) {}

StreamFeeder::~StreamFeeder() {
  Stop();
  thread_.join();
}

void StreamFeeder::Add(std::shared_ptr<Feed> feed) {
  {
    absl::MutexLock lock(&mutex_);
    if (!stopping_) {
      feeds_.push_back(std::move(feed));
      awake_ = true;
      return;
    }
  }
  feed->End(GoingDown());
}

void StreamFeeder::Wake() {
  absl::MutexLock lock(&mutex_);
  awake_ = true;
}

void StreamFeeder::Stop() {
  std::vector<std::shared_ptr<Feed>> feeds;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    feeds = feeds_;
  }
  for (const std::shared_ptr<Feed>& feed : feeds) feed->End(GoingDown());
}

void StreamFeeder::Run() {
  for (;;) {
    std::vector<std::shared_ptr<Feed>> feeds;
    {
      absl::MutexLock lock(&mutex_);
      const auto due = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return awake_ || stopping_; };
      if (feeds_.empty()) {
        mutex_.Await(absl::Condition(&due));
      } else {
        AwaitFor(&mutex_, absl::Condition(&due), absl::Milliseconds(kTickMs));
      }
      awake_ = false;
      if (stopping_) {
        feeds.swap(feeds_);  // They go outside the lock.
      } else {
        feeds = feeds_;
      }
    }
    std::vector<const Feed*> ended;
    const int64_t now = clock_->MonotonicNanos();
    for (const std::shared_ptr<Feed>& feed : feeds) {
      if (!feed->Pump(now)) ended.push_back(feed.get());
    }
    absl::MutexLock lock(&mutex_);
    if (stopping_ && feeds_.empty()) return;
    if (!ended.empty()) {
      std::erase_if(feeds_, [&ended](const std::shared_ptr<Feed>& feed) {
        return std::find(ended.begin(), ended.end(), feed.get()) != ended.end();
      });
    }
  }
}

}  // namespace bellwether::server
