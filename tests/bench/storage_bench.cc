// storage_bench: what a run costs on disk, part by part, and how long a series
// of it takes to read, through a real bellwetherd.
//
//   storage_bench --server PATH_OF_BELLWETHERD [--recording FILE.bwrun]
//                 [--steps N] [--layers L] [--heads H]
//
// Imports a recorded run, or one of the signal mix (a norm, a signed sum, a mean
// and a count, full float32 mantissas; the norm over the mean is a derived
// signal), and measures at four points: all steps taken while the run is live,
// the run ended, the server stopped, the server started again on files that the
// kernel no longer holds in memory.  Times are of one GetSeries with 1,000 points
// over the wire, the first of its kind at its point.
// Prints one JSON object.

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>

#include "bellwether/recording.h"
#include "bellwether/v1/query.grpc.pb.h"
#include "tests/bench/bench_server.h"
#include "tests/bench/disk_parts.h"
#include "tests/support/signal_mix.h"

namespace bellwether {
namespace {

constexpr size_t kPieceBytes = 128 << 10;  // Of a recording, in one message.
constexpr size_t kMixSteps = 2048;         // Distinct steps of the mix, used in turn.

struct Arguments {
  std::string server, recording;
  int64_t steps = 20'000;
  int layers = 32, heads = 32;
};

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

// One import, in pieces.
class Import {
 public:
  explicit Import(v1::Query::Stub* stub) : writer_(stub->ImportRun(&context_, &response_)) {}

  bool Write(std::string_view bytes) {
    v1::ImportRunRequest request;
    for (; !bytes.empty(); bytes.remove_prefix(std::min(kPieceBytes, bytes.size()))) {
      request.set_chunk(std::string(bytes.substr(0, kPieceBytes)));
      if (!writer_->Write(request)) return false;
    }
    return true;
  }
  v1::Run Finish() {
    writer_->WritesDone();
    const grpc::Status status = writer_->Finish();
    if (!status.ok()) Fail("import: " + status.error_message());
    return response_.run();
  }

 private:
  grpc::ClientContext context_;
  v1::ImportRunResponse response_;
  std::unique_ptr<grpc::ClientWriter<v1::ImportRunRequest>> writer_;
};

// What was imported.
struct Imported {
  std::string run, measured, derived;
  uint64_t values = 0;
  int64_t last_step = 0;
};

void ImportMix(const Arguments& arguments, Import* import, Imported* imported) {
  const auto cells = static_cast<size_t>(arguments.layers * arguments.heads);
  const auto mix = testing_support::SignalMix(1, kMixSteps, cells);
  const v1::Signal signals[] = {v1::SIGNAL_COMMON_MODE_SUM, v1::SIGNAL_DELTA_BIAS_SUM, v1::SIGNAL_SPREAD_SUM,
                                v1::SIGNAL_TIED_ROWS_BF16};
  RecordingWriter writer([import](std::string_view bytes) { return import->Write(bytes); }, /*zstd_level=*/-5);
  v1::RecordedMessage hello;
  v1::RunDescription* run = hello.mutable_message()->mutable_hello()->mutable_run();
  hello.mutable_message()->mutable_hello()->set_protocol(1);
  run->set_name("mix");
  run->set_uuid("0123456789abcdef");
  run->set_world(1);
  run->set_reporters(1);
  run->mutable_layout()->set_layers(static_cast<uint32_t>(arguments.layers));
  run->mutable_layout()->set_heads(static_cast<uint32_t>(arguments.heads));
  run->mutable_layout()->set_kv_heads(static_cast<uint32_t>(arguments.heads));
  bool ok = writer.Write(hello);
  v1::RecordedMessage recorded;
  v1::Frame* frame = recorded.mutable_message()->mutable_frame();
  frame->set_parts(1);
  for (const v1::Signal signal : signals) {
    v1::Block* block = frame->add_blocks();
    block->set_signal(signal);
    block->set_layer_count(static_cast<uint32_t>(arguments.layers));
    block->set_head_count(static_cast<uint32_t>(arguments.heads));
  }
  for (int64_t step = 0; ok && step < arguments.steps; ++step) {
    recorded.mutable_message()->set_seq(static_cast<uint64_t>(step + 1));
    frame->set_step(step);
    frame->set_time_unix_ns(1'700'000'000'000'000'000 + step * 300'000'000);
    for (int s = 0; s < 4; ++s) {
      const float* const values = mix[static_cast<size_t>(s)].data() + static_cast<size_t>(step) % kMixSteps * cells;
      frame->mutable_blocks(s)->mutable_values()->Assign(values, values + cells);
    }
    ok = writer.Write(recorded);
  }
  if (!ok || !writer.Finish()) Fail("the import was refused");
  *imported = {"mix", "common_mode_sum", "drift_ratio", static_cast<uint64_t>(arguments.steps) * 4 * cells,
               arguments.steps - 1};
}

void ImportFile(const std::string& path, Import* import, Imported* imported) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  RecordingReader reader;
  reader.Feed(bytes);
  v1::RecordedMessage recorded;
  while (reader.Next(&recorded) == RecordingReader::Result::kMessage) {
    const v1::ClientMessage& message = recorded.message();
    if (message.has_hello()) imported->run = message.hello().run().name();
    for (const v1::Block& block : message.frame().blocks())
      imported->values += static_cast<uint64_t>(block.values_size());
    if (message.has_frame()) imported->last_step = std::max(imported->last_step, message.frame().step());
  }
  if (imported->run.empty()) Fail(path + ": not a recording");
  imported->measured = "loss";
  imported->derived = "drift_ratio";
  if (!import->Write(bytes)) Fail("the import was refused");
}

double SeriesMs(v1::Query::Stub* stub, const std::string& run, const std::string& signal) {
  v1::GetSeriesRequest request;
  request.set_run(run);
  request.set_attempt(-1);
  request.add_series()->set_signal(signal);
  request.set_points_max(1000);
  v1::GetSeriesResponse response;
  grpc::ClientContext context;
  const auto begin = std::chrono::steady_clock::now();
  const grpc::Status status = stub->GetSeries(&context, request, &response);
  const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  if (!status.ok()) Fail("GetSeries: " + status.error_message());
  if (response.series(0).step_size() == 0) Fail("GetSeries: " + signal + " has no points");
  return ms;
}

void PrintQueries(const char* point, v1::Query::Stub* stub, const Imported& imported) {
  const double measured = SeriesMs(stub, imported.run, imported.measured);
  const double derived = SeriesMs(stub, imported.run, imported.derived);
  std::printf(", \"%s_measured_ms\": %.2f, \"%s_derived_ms\": %.2f", point, measured, point, derived);
}

void AwaitStep(v1::Query::Stub* stub, const Imported& imported) {
  v1::GetRunRequest request;
  request.set_run(imported.run);
  v1::Run run;
  do {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    grpc::ClientContext context;
    if (!stub->GetRun(&context, request, &run).ok()) Fail("GetRun");
  } while (run.step() < imported.last_step);
}

void DropFromPageCache(const std::filesystem::path& folder) {
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    const int fd = open(file.path().c_str(), O_RDONLY);
    if (fd < 0 || fdatasync(fd) != 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0) Fail("the page cache");
    close(fd);
  }
}

std::unique_ptr<v1::Query::Stub> Connect(const BenchServer& server) {
  auto channel = grpc::CreateChannel(server.address(), grpc::InsecureChannelCredentials());
  if (!channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(20))) Fail("no connection");
  return v1::Query::NewStub(channel);
}

int Run(const Arguments& arguments) {
  BenchServer server(arguments.server);
  auto stub = Connect(server);
  Imported imported;
  const auto begin = std::chrono::steady_clock::now();
  {
    Import import(stub.get());
    if (arguments.recording.empty()) {
      ImportMix(arguments, &import, &imported);
    } else {
      ImportFile(arguments.recording, &import, &imported);
    }
    AwaitStep(stub.get(), imported);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    const auto values = static_cast<double>(imported.values);
    std::printf("{\"bench\": \"storage\", \"run\": \"%s\", \"steps\": %ld, \"values\": %.0f, \"import_seconds\": %.2f",
                imported.run.c_str(), static_cast<long>(imported.last_step + 1), values, seconds.count());
    PrintQueries("live", stub.get(), imported);
    std::printf(", \"live\": %s", ToJson(MeasureDisk(server.data()), values).c_str());
    import.Finish();
    std::printf(", \"ended\": %s", ToJson(MeasureDisk(server.data()), values).c_str());
    server.Stop();
    std::printf(", \"stopped\": %s", ToJson(MeasureDisk(server.data()), values).c_str());
  }
  DropFromPageCache(server.data() / "db");
  server.Start();
  stub = Connect(server);
  PrintQueries("cold", stub.get(), imported);
  std::printf("}\n");
  server.Stop();
  return 0;
}

}  // namespace
}  // namespace bellwether

int main(int argc, char** argv) {
  bellwether::Arguments arguments;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--server") arguments.server = argv[i + 1];
    if (flag == "--recording") arguments.recording = argv[i + 1];
    if (flag == "--steps") arguments.steps = std::atol(argv[i + 1]);
    if (flag == "--layers") arguments.layers = std::atoi(argv[i + 1]);
    if (flag == "--heads") arguments.heads = std::atoi(argv[i + 1]);
  }
  if (arguments.server.empty()) {
    std::fprintf(stderr,
                 "usage: storage_bench --server PATH_OF_BELLWETHERD [--recording FILE.bwrun]\n"
                 "                     [--steps N] [--layers L] [--heads H]\n");
    return 2;
  }
  return bellwether::Run(arguments);
}
