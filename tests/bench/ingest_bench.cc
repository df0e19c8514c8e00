// ingest_bench: values per second from the wire to a durable ack, with WAL
// fsync, store, detectors and exporter on.
//
//   ingest_bench --server PATH_OF_BELLWETHERD [--seconds S] [--frames-per-second F [--alerts 1]] [--runs R]
//
// Starts a real bellwetherd on core 0 and loads it from the others with frames
// of 32 layers x 32 heads x 4 signals (16 KiB): a norm, a signed sum, a mean
// and a count, full float32 mantissas.  The window of unacknowledged frames is
// bounded as a sender's is.  Without --frames-per-second the stream runs as
// fast as acks come; with it, each run sends at its share of that rate and the
// latency from write to ack is what counts.  With --alerts, one head of each
// run turns NaN once, the runs spread over the time; from the write of that
// frame until a WatchAlerts stream tells of the run's alert is the alert
// latency.  The disk's own share is measured first, in the same folder: writes
// of 16 KiB at the same rate (at most 1,000 a second), each with its fdatasync.  Prints one JSON object; the parts of
// the disk as in storage_bench.

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "bellwether/v1/ingest.grpc.pb.h"
#include "bellwether/v1/query.grpc.pb.h"
#include "tests/bench/bench_server.h"
#include "tests/bench/disk_parts.h"
#include "tests/bench/load_parts.h"

namespace bellwether {
namespace {

constexpr size_t kWindow = 512;  // Unacknowledged frames a stream, 8 MiB.

struct Arguments {
  std::string server;
  double seconds = 10;
  double frames_per_second = 0;
  int runs = 1;
  bool alerts = false;
};

// A connection of its own, as every trainer has.
std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

std::string RunName(int number) { return "bench-" + std::to_string(number); }

// One run of one rank.
class Load {
 public:
  // Connected, but silent before Start.  `alert_seq`: the frame whose first
  // value is NaN instead; 0 = none.
  Load(const std::string& address, int number, const std::vector<v1::ClientMessage>& frames, double frames_per_second,
       uint64_t alert_seq)
      : stub_(v1::Ingest::NewStub(Connect(address))),
        frames_(frames),
        rate_(frames_per_second),
        alert_seq_(alert_seq),
        first_step_(37 * number) {
    stream_ = stub_->Attach(&context_);
    stream_->Write(MakeBenchHello(RunName(number), number));
    v1::ServerMessage welcome;
    if (!stream_->Read(&welcome) || !welcome.has_welcome()) {
      std::fprintf(stderr, "no welcome: %s\n", stream_->Finish().error_message().c_str());
      std::exit(1);
    }
  }

  // Sends the frames in turn from `begin` to `end`.
  void Start(double begin, double end) {
    reader_ = std::thread([this] { ReadAcks(); });
    writer_ = std::thread([this, begin, end] { WriteFrames(begin, end); });
  }
  void Join() {
    writer_.join();
    reader_.join();
    stream_->Finish();
  }
  uint64_t acked() const { return acked_; }
  const std::vector<double>& latencies() const { return latencies_; }
  // When the frame that raises the alert was sent; 0 = it was not.
  double alert_sent_at() const { return sent_at_[alert_seq_]; }

 private:
  void WriteFrames(double begin, double end) {
    uint64_t seq = 0;
    v1::ClientMessage message;
    while (BenchNow() < end && seq + 1 < sent_at_.size()) {
      while (seq - acked_ >= kWindow) std::this_thread::sleep_for(std::chrono::microseconds(50));
      if (rate_ > 0) {
        const double due = begin + static_cast<double>(seq) / rate_;
        std::this_thread::sleep_for(std::chrono::duration<double>(due - BenchNow()));
      }
      message = frames_[seq % kBenchSteps];
      message.mutable_frame()->set_step(first_step_ + static_cast<int64_t>(seq));
      message.set_seq(++seq);
      if (seq == alert_seq_) message.mutable_frame()->mutable_blocks(0)->set_values(0, NAN);
      sent_at_[seq] = BenchNow();
      if (!stream_->Write(message)) break;
    }
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
      const double now = BenchNow();
      for (uint64_t seq = acked_ + 1; seq <= message.ack().durable_seq(); ++seq)
        latencies_.push_back(now - sent_at_[seq]);
      acked_ = message.ack().durable_seq();
    }
  }

  std::unique_ptr<v1::Ingest::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ClientMessage, v1::ServerMessage>> stream_;
  const std::vector<v1::ClientMessage>& frames_;
  const double rate_;
  const uint64_t alert_seq_;
  const int64_t first_step_;  // Jobs are at different steps: their windows do not fill at the same moment.
  std::vector<double> sent_at_ = std::vector<double>(1 << 20);  // By seq.
  std::vector<double> latencies_;
  std::atomic<uint64_t> acked_ = 0;
  std::thread reader_, writer_;
};

// One series of the first run, in ms; negative if it failed.
double QueryMs(const std::string& address) {
  auto query = v1::Query::NewStub(Connect(address));
  v1::GetSeriesRequest request;
  request.set_run(RunName(0));
  request.set_attempt(-1);
  request.add_series()->set_signal("wq_sigma");
  request.set_points_max(1000);
  v1::GetSeriesResponse response;
  grpc::ClientContext context;
  const double asked = BenchNow();
  const grpc::Status answered = query->GetSeries(&context, request, &response);
  return answered.ok() ? (BenchNow() - asked) * 1e3 : -1;
}

int Run(const Arguments& arguments) {
  const std::vector<v1::ClientMessage> frames = MakeBenchFrames();
  BenchServer server(arguments.server);
  const std::vector<double> sync_seconds = MeasureSyncs(server.data(), arguments.frames_per_second);
  const AlertWatch watch(Connect(server.address()));
  const double rate = arguments.frames_per_second / arguments.runs;
  std::vector<std::unique_ptr<Load>> loads;
  for (int i = 0; i < arguments.runs; ++i) {
    // Spread over all but the first and last second.
    const double at = 1 + (arguments.seconds - 2) * (i + 0.5) / arguments.runs;
    const uint64_t alert_seq = arguments.alerts ? 1 + static_cast<uint64_t>(at * rate) : 0;
    loads.push_back(std::make_unique<Load>(server.address(), i, frames, rate, alert_seq));
  }
  // All at once: to connect a hundred runs takes longer than the last second.
  const double begin = BenchNow();
  const double cpu_begin = server.CpuSeconds();
  for (int i = 0; i < arguments.runs; ++i) {
    // Not in step: jobs know nothing of each other.
    const double after = rate > 0 ? i / arguments.frames_per_second : 0;
    loads[static_cast<size_t>(i)]->Start(begin + after, begin + arguments.seconds);
  }
  uint64_t sent = 0;
  size_t alerts_sent = 0;
  std::vector<double> ack_seconds, alert_seconds;
  for (const auto& load : loads) {
    load->Join();
    sent += load->acked();
    ack_seconds.insert(ack_seconds.end(), load->latencies().begin(), load->latencies().end());
  }
  const double seconds = BenchNow() - begin;
  const double cpu = server.CpuSeconds() - cpu_begin;
  if (arguments.alerts) {
    const auto told_at = watch.told_at(loads.size());
    for (int i = 0; i < arguments.runs; ++i) {
      const double sent_at = loads[static_cast<size_t>(i)]->alert_sent_at();
      if (sent_at == 0) continue;
      ++alerts_sent;
      const auto told = told_at.find(RunName(i));
      if (told != told_at.end()) alert_seconds.push_back(told->second - sent_at);
    }
  }

  const double query_ms = QueryMs(server.address());
  const double values = static_cast<double>(sent) * kBenchValues;
  const std::string live = ToJson(MeasureDisk(server.data()), values);
  server.Stop();
  const std::string stopped = ToJson(MeasureDisk(server.data()), values);
  std::printf(
      "{\"bench\": \"ingest\", \"runs\": %d, \"frames\": %lu, \"seconds\": %.2f, \"frames_per_second\": %.0f, "
      "\"values_per_second\": %.3g, \"server_cpu_seconds\": %.2f, \"values_per_cpu_second\": %.3g, "
      "\"fdatasync_ms_p50\": %.2f, \"fdatasync_ms_p99\": %.2f, "
      "\"ack_ms_p50\": %.2f, \"ack_ms_p99\": %.2f, \"alerts_sent\": %zu, \"alerts\": %zu, \"alert_ms_p50\": %.2f, "
      "\"alert_ms_p99\": %.2f, "
      "\"alert_ms_max\": %.2f, \"series_query_ms\": %.2f, \"live\": %s, \"stopped\": %s}\n",
      arguments.runs, static_cast<unsigned long>(sent), seconds, static_cast<double>(sent) / seconds, values / seconds,
      cpu, values / cpu, PercentileMs(sync_seconds, 0.5), PercentileMs(sync_seconds, 0.99),
      PercentileMs(ack_seconds, 0.5), PercentileMs(ack_seconds, 0.99), alerts_sent, alert_seconds.size(),
      PercentileMs(alert_seconds, 0.5), PercentileMs(alert_seconds, 0.99), PercentileMs(alert_seconds, 1), query_ms,
      live.c_str(), stopped.c_str());
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
    if (flag == "--alerts") arguments.alerts = std::atoi(argv[i + 1]) != 0;
  }
  if (arguments.server.empty() || (arguments.alerts && arguments.frames_per_second <= 0)) {
    std::fprintf(stderr,
                 "usage: ingest_bench --server PATH_OF_BELLWETHERD [--seconds S] [--frames-per-second F [--alerts 1]] "
                 "[--runs R]\n");
    return 2;
  }
  return bellwether::Run(arguments);
}
