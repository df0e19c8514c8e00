// receiver.h: the other end of a notification, on loopback, which records, refuses or stalls.

#ifndef BELLWETHER_TESTS_SERVER_EXPORT_RECEIVER_H_
#define BELLWETHER_TESTS_SERVER_EXPORT_RECEIVER_H_

#include <gtest/gtest.h>
#include <httplib.h>

#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace bellwether::server {

// Thread-safe.
class Receiver {
 public:
  static constexpr absl::Duration kPatience = absl::Seconds(20);

  // Takes POSTs to `path`.
  explicit Receiver(std::string path) : path_(std::move(path)) {
    server_.Post(path_, [this](const httplib::Request& request, httplib::Response& response) {
      absl::MutexLock lock(&mutex_);
      bodies_.push_back(nlohmann::json::parse(request.body));
      response.status = refuse_ > 0 ? 503 : 200;
      if (refuse_ > 0) --refuse_;
      const auto free = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !stall_; };
      mutex_.Await(absl::Condition(&free));
    });
    port_ = server_.bind_to_any_port("127.0.0.1");
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::yield();
  }
  ~Receiver() {
    Stall(false);
    server_.stop();
    thread_.join();
  }
  std::string origin() const { return absl::StrCat("http://127.0.0.1:", port_); }
  std::string url() const { return origin() + path_; }
  void Refuse(int times) {
    absl::MutexLock lock(&mutex_);
    refuse_ = times;
  }
  void Stall(bool stall) {
    absl::MutexLock lock(&mutex_);
    stall_ = stall;
  }
  // The bodies once there are `count`.
  std::vector<nlohmann::json> Await(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto enough = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return bodies_.size() >= count; };
    mutex_.AwaitWithTimeout(absl::Condition(&enough), kPatience);
    EXPECT_GE(bodies_.size(), count);
    return bodies_;
  }

 private:
  const std::string path_;
  httplib::Server server_;
  int port_ = 0;
  std::thread thread_;
  absl::Mutex mutex_;
  std::vector<nlohmann::json> bodies_ ABSL_GUARDED_BY(mutex_);
  int refuse_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stall_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SERVER_EXPORT_RECEIVER_H_
