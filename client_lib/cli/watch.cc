// run watch: a page on a terminal, a line per sample for a program, one frame
// for a pipe.
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <iostream>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cli/cli.h"
#include "cli/follow.h"
#include "cli/terminal.h"
#include "cli/watch_frame.h"

namespace bellwether::cli {
namespace {

using namespace std::chrono_literals;

constexpr uint32_t kAlertsAsked = 100;

struct WatchRunOptions {
  std::string run;
  std::string signal = "drift_ratio";
  std::chrono::milliseconds interval = 1s;
  uint32_t heads = 5;
  bool once = false;
};

// The head with the largest value of the matrix.
std::string Largest(const v1::GetMatrixResponse& matrix) {
  int best = -1;
  for (int i = 0; i < matrix.values_size(); ++i) {
    if (matrix.values(i) == matrix.values(i) && (best < 0 || matrix.values(i) > matrix.values(best))) best = i;
  }
  if (best < 0 || matrix.heads() == 0) return "-";
  const int heads = static_cast<int>(matrix.heads());
  return HeadText(best / heads, best % heads) + " " + Number(matrix.values(best), 4);
}

// The same bytes for the same content; labels are a map.
std::string Fingerprint(const v1::WatchRunResponse& response) {
  std::string bytes;
  google::protobuf::io::StringOutputStream to_bytes(&bytes);
  google::protobuf::io::CodedOutputStream out(&to_bytes);
  out.SetSerializationDeterministic(true);
  response.SerializeToCodedStream(&out);
  out.Trim();
  return bytes;
}

// A line per sample until the run ends.
ExitCode FollowSamples(Cli* cli, const WatchRunOptions& options) {
  v1::WatchRunRequest request;
  request.set_run(options.run);
  request.add_signals(options.signal);
  request.set_min_interval_ms(static_cast<uint32_t>(options.interval.count()));
  bool first = true;
  std::string told;  // A new connection begins with the newest sample: maybe with this one.
  return Follow(cli->connect, [&](Connection* connection, grpc::ClientContext* context, const auto& heard) {
    StreamEnd end;
    const auto stream = connection->stub().WatchRun(context, request);
    v1::WatchRunResponse response;
    while (!end.enough && stream->Read(&response)) {
      heard();
      std::string newest = Fingerprint(response);
      if (newest == told) continue;
      told = std::move(newest);
      std::vector<Cell> row = RunRow(response.run());
      row.emplace_back(response.matrices_size() > 0 ? Largest(response.matrices(0)) : "-");
      Table table = RunTable();
      table.rows.push_back(std::move(row));
      table.columns.push_back("LARGEST " + SignalText(options.signal));
      end.enough = !PrintItem(cli->output, table, response, first) || options.once;
      first = false;
    }
    if (end.enough) context->TryCancel();
    end.status = stream->Finish();
    return end;
  });
}

// The calls of one moment, which another thread may cancel.
class Questions {
 public:
  grpc::Status Ask(Connection* connection, const WatchRunOptions& options, RunState* state) {
    v1::GetRunRequest run;
    run.set_run(options.run);
    grpc::Status status = Call(connection, &v1::Query::Stub::GetRun, run, &state->run);
    v1::GetMatrixRequest matrix;
    matrix.set_run(options.run);
    matrix.set_signal(options.signal);
    matrix.set_step(-1);
    if (status.ok()) status = Call(connection, &v1::Query::Stub::GetMatrix, matrix, &state->matrix);
    v1::TopHeadsRequest top;
    top.set_run(options.run);
    top.set_signal(options.signal);
    top.set_limit(options.heads);
    top.set_step(-1);
    if (status.ok()) status = Call(connection, &v1::Query::Stub::TopHeads, top, &state->top);
    v1::ListAlertsRequest alerts;
    alerts.set_run(options.run);
    alerts.set_firing_only(true);
    alerts.set_limit(kAlertsAsked);
    if (status.ok()) status = Call(connection, &v1::Query::Stub::ListAlerts, alerts, &state->alerts);
    v1::ListActionsRequest actions;
    actions.set_run(options.run);
    if (status.ok()) status = Call(connection, &v1::Query::Stub::ListActions, actions, &state->actions);
    return status;
  }

  // Ends the call that is under way; every later one ends at once.
  void Cancel() {
    const std::lock_guard<std::mutex> lock(mutex_);
    cancelled_ = true;
    if (current_ != nullptr) current_->TryCancel();
  }

 private:
  template <typename Request, typename Response>
  grpc::Status Call(Connection* connection,
                    grpc::Status (v1::Query::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext context;
    connection->Prepare(&context);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (cancelled_) return grpc::Status::CANCELLED;
      current_ = &context;
    }
    const grpc::Status status = (connection->stub().*method)(&context, request, response);
    const std::lock_guard<std::mutex> lock(mutex_);
    current_ = nullptr;
    return status;
  }

  std::mutex mutex_;
  grpc::ClientContext* current_ = nullptr;
  bool cancelled_ = false;
};

// Asks again and again on a thread of its own, so that keys are answered while
// a server is not, and says through an eventfd that there is something new.
class Poller {
 public:
  struct Told {
    std::shared_ptr<const RunState> state;
    std::string trouble;
  };

  Poller(const ConnectOptions& connect, const WatchRunOptions& options, std::unique_ptr<Connection> connection,
         RunState first)
      : connect_(connect),
        options_(options),
        wake_fd_(eventfd(0, EFD_CLOEXEC)),
        told_{.state = std::make_shared<RunState>(std::move(first))},
        thread_([this, c = std::move(connection)]() mutable { Run(std::move(c)); }) {}

  ~Poller() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    stopped_.notify_all();
    questions_.Cancel();
    thread_.join();
    close(wake_fd_);
  }

  int wake_fd() const { return wake_fd_; }
  Told told() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return told_;
  }

 private:
  void Run(std::unique_ptr<Connection> connection) {
    std::string since;  // Of the first failure after an answer.
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        if (stopped_.wait_for(lock, options_.interval, [this] { return stop_; })) return;
      }
      // After a failure everything is looked up again: a private server that
      // was restarted has another address and another token.
      std::string why;
      ExitCode code = kOk;
      if (connection == nullptr) connection = TryConnect(connect_, &code, &why);
      auto state = std::make_shared<RunState>();
      grpc::Status status;
      if (connection != nullptr) {
        status = questions_.Ask(connection.get(), options_, state.get());
        if (!status.ok()) why = Explain(connection.get(), status);
        if (CodeOf(status) == kUnreachable) connection.reset();
      }
      if (why.empty()) {
        since.clear();
      } else if (since.empty()) {
        since = Date(NowUnixNs());
      }
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (why.empty()) told_.state = std::move(state);
        const char* const what = connection == nullptr ? "disconnected since " : "no answer since ";
        told_.trouble = why.empty() ? "" : what + since + ": " + why;
      }
      const uint64_t one = 1;
      (void)!write(wake_fd_, &one, sizeof one);
    }
  }

  const ConnectOptions connect_;
  const WatchRunOptions options_;
  const int wake_fd_;
  Questions questions_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  Told told_;
  std::thread thread_;
};

ExitCode Page(Cli* cli, const WatchRunOptions& options) {
  const HeldSignals signals;
  ExitCode code = kOk;
  std::unique_ptr<Connection> connection = Connect(cli->connect, &code);
  if (connection == nullptr) return code;
  RunState state;
  const grpc::Status status = Questions().Ask(connection.get(), options, &state);
  if (!status.ok()) return Report(connection.get(), status);
  Poller poller(cli->connect, options, std::move(connection), std::move(state));
  Screen screen(&signals);
  const Palette palette = TerminalPalette();
  for (;;) {
    const size_t width = TerminalWidth(), height = std::max<size_t>(TerminalHeight(), 1);
    const Poller::Told told = poller.told();
    std::vector<std::string> lines = Frame(*told.state, told.trouble, NowUnixNs(),
                                           {.width = width, .cut = true, .height = height - 1, .palette = palette});
    lines.resize(height - 1);
    lines.push_back(CutTo("q or Ctrl-C: quit", width));
    screen.Draw(lines);
    if (screen.Wait(poller.wake_fd(), 1s) == Screen::Event::kQuit) return kOk;
  }
}

ExitCode OneFrame(Cli* cli, const WatchRunOptions& options) {
  ExitCode code = kOk;
  const std::unique_ptr<Connection> connection = Connect(cli->connect, &code);
  if (connection == nullptr) return code;
  RunState state;
  const grpc::Status status = Questions().Ask(connection.get(), options, &state);
  if (!status.ok()) return Report(connection.get(), status);
  FrameOptions frame{.palette = TerminalPalette()};
  if (const size_t width = TerminalWidth(); width > 0) {
    frame.width = width;
    frame.cut = true;
  }
  for (const std::string& line : Frame(state, "", NowUnixNs(), frame)) std::cout << line << '\n';
  return kOk;
}

ExitCode WatchRun(Cli* cli, const WatchRunOptions& options) {
  if (cli->output.format != Format::kTable) return FollowSamples(cli, options);
  return options.once || !CanShowPage() ? OneFrame(cli, options) : Page(cli, options);
}

}  // namespace

void AddRunWatch(Cli* cli, CLI::App* noun) {
  CLI::App* command = nullptr;
  auto* const watch = AddCommand<WatchRunOptions>(
      cli, noun, "watch",
      "Follows a run: a live page on a terminal, one frame of it into a pipe, a line per sample as csv, json or yaml",
      "bellwether run watch my-run --signal key_leak --interval 5s", &WatchRun, &command);
  command->add_option("run", watch->run, "the run's name, or its uuid in hexadecimal")->required()->type_name("RUN");
  command->add_option("--signal", watch->signal, "the signal of the heat strip and the top heads")
      ->capture_default_str()
      ->type_name("SIGNAL");
  command->add_option("--heads", watch->heads, "so many top heads, 1..1024")->capture_default_str();
  AddTime(command, "--interval", &watch->interval, 100ms, 60s, "asks again this often");
  command->add_flag("--once", watch->once, "one frame, or one line, and no more");
}

}  // namespace bellwether::cli
