#include "tests/bench/load_parts.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "tests/support/signal_mix.h"

namespace bellwether {

double BenchNow() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double CpuSecondsOf(pid_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string word;
  double ticks = 0;
  for (int i = 1; i <= 15 && stat >> word; ++i) {
    if (i >= 14) ticks += std::stod(word);
  }
  return ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double PercentileMs(std::vector<double> seconds, double share) {
  if (seconds.empty()) return 0;
  const auto at = seconds.begin() + static_cast<ptrdiff_t>(share * static_cast<double>(seconds.size() - 1));
  std::nth_element(seconds.begin(), at, seconds.end());
  return *at * 1e3;
}

std::vector<v1::ClientMessage> MakeBenchFrames() {
  const auto mix = testing_support::SignalMix(1, kBenchSteps, kBenchLayers * kBenchHeads);
  const v1::Signal signals[] = {v1::SIGNAL_WQ_SIGMA, v1::SIGNAL_DELTA_BIAS_SUM, v1::SIGNAL_LOGIT_MAX,
                                v1::SIGNAL_TIED_ROWS_BF16};
  std::vector<v1::ClientMessage> frames(kBenchSteps);
  for (size_t step = 0; step < kBenchSteps; ++step) {
    v1::Frame* frame = frames[step].mutable_frame();
    frame->set_parts(1);
    for (size_t s = 0; s < std::size(signals); ++s) {
      v1::Block* block = frame->add_blocks();
      block->set_signal(signals[s]);
      block->set_layer_count(kBenchLayers);
      block->set_head_count(kBenchHeads);
      const float* values = mix[s].data() + step * kBenchLayers * kBenchHeads;
      block->mutable_values()->Add(values, values + kBenchLayers * kBenchHeads);
    }
  }
  return frames;
}

v1::ClientMessage MakeBenchHello(const std::string& run_name, int number) {
  v1::ClientMessage hello;
  hello.mutable_hello()->set_protocol(1);
  v1::RunDescription* run = hello.mutable_hello()->mutable_run();
  run->set_name(run_name);
  std::string uuid(16, '\0');
  std::memcpy(uuid.data(), &number, sizeof(number));
  run->set_uuid(uuid);
  run->set_world(1);
  run->set_reporters(1);
  run->mutable_layout()->set_layers(kBenchLayers);
  run->mutable_layout()->set_heads(kBenchHeads);
  run->mutable_layout()->set_kv_heads(kBenchHeads);
  return hello;
}

std::vector<double> MeasureSyncs(const std::filesystem::path& folder, double frames_per_second) {
  constexpr size_t kBytes = kBenchValues * sizeof(float), kWrites = 2000;
  const double rate = frames_per_second > 0 ? std::min(frames_per_second, 1000.) : 1000;
  const std::string bytes(kBytes, 'x');
  const std::filesystem::path path = folder / "sync_peer";
  const int file = open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  if (file < 0 || posix_fallocate(file, 0, kBytes * kWrites) != 0) {
    std::perror(path.c_str());
    std::exit(1);
  }
  std::vector<double> seconds;
  const double begin = BenchNow();
  for (size_t i = 0; i < kWrites; ++i) {
    std::this_thread::sleep_for(std::chrono::duration<double>(begin + static_cast<double>(i) / rate - BenchNow()));
    const double at = BenchNow();
    if (pwrite(file, bytes.data(), kBytes, static_cast<off_t>(i * kBytes)) != ssize_t{kBytes} || fdatasync(file) != 0) {
      std::perror(path.c_str());
      std::exit(1);
    }
    seconds.push_back(BenchNow() - at);
  }
  close(file);
  std::filesystem::remove(path);
  return seconds;
}

AlertWatch::AlertWatch(const std::shared_ptr<grpc::Channel>& channel) : stub_(v1::Query::NewStub(channel)) {
  v1::WatchAlertsRequest request;
  request.set_after_id(UINT64_MAX);
  stream_ = stub_->WatchAlerts(&context_, request);
  v1::WatchAlertsResponse response;
  bool ready = false;
  while (!ready && stream_->Read(&response)) ready = response.caught_up();
  if (!ready) {
    std::fprintf(stderr, "alerts cannot be watched: %s\n", stream_->Finish().error_message().c_str());
    std::exit(1);
  }
  reader_ = std::thread([this] { Read(); });
}

AlertWatch::~AlertWatch() {
  context_.TryCancel();
  reader_.join();
}

std::map<std::string, double> AlertWatch::told_at(size_t runs) const {
  for (const double begin = BenchNow(); BenchNow() < begin + 10;) {
    {
      const std::lock_guard lock(mutex_);
      if (told_at_.size() >= runs) break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const std::lock_guard lock(mutex_);
  return told_at_;
}

void AlertWatch::Read() {
  v1::WatchAlertsResponse response;
  while (stream_->Read(&response)) {
    const double now = BenchNow();
    // Runs that rest between two phases are silent.
    if (!response.has_transition() || response.transition().rule() == "silent") continue;
    const std::lock_guard lock(mutex_);
    told_at_.emplace(response.transition().run(), now);
  }
}

}  // namespace bellwether
