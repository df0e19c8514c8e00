// ingest_bench: values per second from the wire to a durable ack, with WAL
// fsync, store, detectors and exporter on.
//
//   ingest_bench --server PATH_OF_BELLWETHERD [--seconds S] [--frames-per-second F] [--runs R]
//
// Starts a real bellwetherd on core 0 and loads it from the others with frames
// of 32 layers x 32 heads x 4 signals (16 KiB): a norm, a signed sum, a mean
// and a count, full float32 mantissas.  The window of unacknowledged frames is
// bounded as a sender's is.  Without --frames-per-second the stream runs as
// fast as acks come; with it, each run sends at its share of that rate and the
// latency from write to ack is what counts.  Prints one JSON object.

#include <grpcpp/grpcpp.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bellwether/v1/ingest.grpc.pb.h"
#include "bellwether/v1/query.grpc.pb.h"
#include "tests/support/signal_mix.h"

namespace bellwether {
namespace {

constexpr int kLayers = 32, kHeads = 32, kValues = 4 * kLayers * kHeads;
constexpr size_t kWindow = 512;  // Unacknowledged frames a stream, 8 MiB.
constexpr size_t kSteps = 256;   // Distinct steps of values, used in turn.

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Arguments {
  std::string server;
  double seconds = 10;
  double frames_per_second = 0;
  int runs = 1;
};

class ServerProcess {
 public:
  explicit ServerProcess(const std::string& binary) {
    folder_ = std::filesystem::temp_directory_path() / ("bellwether-ingest-bench-" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
    const std::string ready = folder_ / "ready.json";
    address_ = "unix:" + (folder_ / "grpc.sock").string();
    pid_ = fork();
    if (pid_ == 0) {
      cpu_set_t cores;
      CPU_ZERO(&cores);
      CPU_SET(0, &cores);
      sched_setaffinity(0, sizeof(cores), &cores);
      execl(binary.c_str(), binary.c_str(), ("--storage.path=" + (folder_ / "data").string()).c_str(),
            ("--grpc.listen-address=" + address_).c_str(), "--web.listen-address=127.0.0.1:0",
            ("--ready.file=" + ready).c_str(), "--log.level=warn", nullptr);
      _exit(127);
    }
    while (!std::filesystem::exists(ready)) {
      if (waitpid(pid_, nullptr, WNOHANG) != 0) {
        std::fprintf(stderr, "%s did not start\n", binary.c_str());
        std::exit(1);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  ~ServerProcess() { std::filesystem::remove_all(folder_); }

  double CpuSeconds() const {
    std::ifstream stat("/proc/" + std::to_string(pid_) + "/stat");
    std::string word;
    double ticks = 0;
    for (int i = 1; i <= 15 && stat >> word; ++i) {
      if (i >= 14) ticks += std::stod(word);
    }
    return ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
  }
  // Ends it in order and returns the bytes of its database.
  int64_t StopAndMeasure() const {
    kill(pid_, SIGTERM);
    waitpid(pid_, nullptr, 0);
    int64_t bytes = 0;
    for (const auto& file : std::filesystem::recursive_directory_iterator(folder_ / "data" / "db")) {
      if (file.path().extension() == ".sst") bytes += static_cast<int64_t>(file.file_size());
    }
    return bytes;
  }
  const std::string& address() const { return address_; }

 private:
  std::filesystem::path folder_;
  std::string address_;
  pid_t pid_ = 0;
};

// One run of one rank.
class Load {
 public:
  Load(const std::string& address, int number, double frames_per_second, double end)
      : channel_(grpc::CreateChannel(address, grpc::InsecureChannelCredentials())),
        stub_(v1::Ingest::NewStub(channel_)), rate_(frames_per_second), end_(end) {
    const auto mix = testing_support::SignalMix(static_cast<uint32_t>(number + 1), kSteps, kLayers * kHeads);
    const v1::Signal signals[] = {v1::SIGNAL_WQ_SIGMA, v1::SIGNAL_DELTA_BIAS_SUM, v1::SIGNAL_LOGIT_MAX,
                                  v1::SIGNAL_TIED_ROWS_BF16};
    frames_.resize(kSteps);
    for (size_t step = 0; step < kSteps; ++step) {
      v1::Frame* frame = frames_[step].mutable_frame();
      frame->set_parts(1);
      for (int s = 0; s < 4; ++s) {
        v1::Block* block = frame->add_blocks();
        block->set_signal(signals[s]);
        block->set_layer_count(kLayers);
        block->set_head_count(kHeads);
        const float* values = mix[static_cast<size_t>(s)].data() + step * kLayers * kHeads;
        block->mutable_values()->Add(values, values + kLayers * kHeads);
      }
    }
    v1::ClientMessage hello;
    hello.mutable_hello()->set_protocol(1);
    v1::RunDescription* run = hello.mutable_hello()->mutable_run();
    run->set_name("bench-" + std::to_string(number));
    std::string uuid(16, '\0');
    std::memcpy(uuid.data(), &number, sizeof(number));
    run->set_uuid(uuid);
    run->set_world(1);
    run->set_reporters(1);
    run->mutable_layout()->set_layers(kLayers);
    run->mutable_layout()->set_heads(kHeads);
    run->mutable_layout()->set_kv_heads(kHeads);
    stream_ = stub_->Attach(&context_);
    stream_->Write(hello);
    v1::ServerMessage welcome;
    if (!stream_->Read(&welcome) || !welcome.has_welcome()) {
      std::fprintf(stderr, "no welcome: %s\n", stream_->Finish().error_message().c_str());
      std::exit(1);
    }
    sent_at_.resize(1 << 20);
    reader_ = std::thread([this] { ReadAcks(); });
    writer_ = std::thread([this] { WriteFrames(); });
  }

  void Join() {
    writer_.join();
    reader_.join();
    stream_->Finish();
  }
  uint64_t acked() const { return acked_; }
  const std::vector<double>& latencies() const { return latencies_; }

 private:
  void WriteFrames() {
    const double begin = Now();
    uint64_t seq = 0;
    while (Now() < end_ && seq + 1 < sent_at_.size()) {
      while (seq - acked_ >= kWindow) std::this_thread::sleep_for(std::chrono::microseconds(50));
      if (rate_ > 0) {
        const double due = begin + static_cast<double>(seq) / rate_;
        while (Now() < due) std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      v1::ClientMessage& message = frames_[seq % kSteps];
      message.mutable_frame()->set_step(static_cast<int64_t>(seq));
      message.set_seq(++seq);
      sent_at_[seq] = Now();
      if (!stream_->Write(message)) break;
    }
    last_ = seq;
    while (acked_ < seq) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    v1::ClientMessage bye;
    bye.mutable_bye()->set_reason(v1::BYE_REASON_FINISHED);
    stream_->Write(bye);
    stream_->WritesDone();
  }

  void ReadAcks() {
    v1::ServerMessage message;
    while (stream_->Read(&message)) {
      if (!message.has_ack()) continue;
      const double now = Now();
      for (uint64_t seq = acked_ + 1; seq <= message.ack().durable_seq(); ++seq) latencies_.push_back(now - sent_at_[seq]);
      acked_ = message.ack().durable_seq();
    }
  }

  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Ingest::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ClientMessage, v1::ServerMessage>> stream_;
  const double rate_, end_;
  std::vector<v1::ClientMessage> frames_;
  std::vector<double> sent_at_;
  std::vector<double> latencies_;
  std::atomic<uint64_t> acked_ = 0;
  uint64_t last_ = 0;
  std::thread reader_, writer_;
};

int Run(const Arguments& arguments) {
  const ServerProcess server(arguments.server);
  const double begin = Now();
  const double cpu_begin = server.CpuSeconds();
  std::vector<std::unique_ptr<Load>> loads;
  for (int i = 0; i < arguments.runs; ++i) {
    loads.push_back(std::make_unique<Load>(server.address(), i, arguments.frames_per_second / arguments.runs,
                                           begin + arguments.seconds));
  }
  uint64_t frames = 0;
  std::vector<double> latencies;
  for (const auto& load : loads) {
    load->Join();
    frames += load->acked();
    latencies.insert(latencies.end(), load->latencies().begin(), load->latencies().end());
  }
  const double seconds = Now() - begin;
  const double cpu = server.CpuSeconds() - cpu_begin;
  std::sort(latencies.begin(), latencies.end());
  const auto at = [&](double share) { return latencies.empty() ? 0 : latencies[static_cast<size_t>(share * static_cast<double>(latencies.size() - 1))] * 1e3; };

  auto query = v1::Query::NewStub(grpc::CreateChannel(server.address(), grpc::InsecureChannelCredentials()));
  v1::GetSeriesRequest request;
  request.set_run("bench-0");
  request.set_attempt(-1);
  request.add_series()->set_signal("wq_sigma");
  request.set_points_max(1000);
  v1::GetSeriesResponse response;
  grpc::ClientContext context;
  const double asked = Now();
  const grpc::Status answered = query->GetSeries(&context, request, &response);
  const double query_ms = (Now() - asked) * 1e3;
  const double values = static_cast<double>(frames) * kValues;
  const int64_t bytes = server.StopAndMeasure();
  std::printf(
      "{\"bench\": \"ingest\", \"runs\": %d, \"frames\": %lu, \"seconds\": %.2f, \"frames_per_second\": %.0f, "
      "\"values_per_second\": %.3g, \"server_cpu_seconds\": %.2f, \"values_per_cpu_second\": %.3g, "
      "\"ack_ms_p50\": %.2f, \"ack_ms_p99\": %.2f, \"bytes_per_value\": %.3f, \"series_query_ms\": %.2f, \"query_ok\": %s}\n",
      arguments.runs, static_cast<unsigned long>(frames), seconds, static_cast<double>(frames) / seconds, values / seconds,
      cpu, values / cpu, at(0.5), at(0.99), static_cast<double>(bytes) / values, query_ms, answered.ok() ? "true" : "false");
  return 0;
}

}  // namespace
}  // namespace bellwether

int main(int argc, char** argv) {
  bellwether::Arguments arguments;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--server") arguments.server = argv[i + 1];
    if (flag == "--seconds") arguments.seconds = std::atof(argv[i + 1]);
    if (flag == "--frames-per-second") arguments.frames_per_second = std::atof(argv[i + 1]);
    if (flag == "--runs") arguments.runs = std::atoi(argv[i + 1]);
  }
  if (arguments.server.empty()) {
    std::fprintf(stderr, "usage: ingest_bench --server PATH_OF_BELLWETHERD [--seconds S] [--frames-per-second F] [--runs R]\n");
    return 2;
  }
  return bellwether::Run(arguments);
}
