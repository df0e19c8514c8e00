// query_test_server: a Query service full of synthetic runs, for the tests of
// what talks to it.
//
//   query_test_server [--token T] [--tls-ca F --tls-cert F --tls-key F]
//                     [--absent ADDRESS,ADDRESS... [--unserved N]]
//
// --absent: of a cluster, whose other servers do not answer.
//
// Prints "port N" once it serves.  Then takes one command a line on stdin and
// answers "ok": "post KEY BYTES" posts a firing warning of run gpt-bf16, "end"
// ends that run, "export BYTES" makes exports BYTES long, "pad" takes from run
// gpt-fp32 what a mask takes in two of its three layers, "unreported" all its
// losses; "nan" gives it one that is NaN.  Ends with stdin.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "server/query/query_service.h"
#include "server/query/run_router.h"
#include "tests/support/absent_peers.h"
#include "tests/support/access_files.h"
#include "tests/support/query_stack.h"

namespace {

using namespace bellwether::server;

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::shared_ptr<grpc::ServerCredentials> ListeningCredentials(std::map<std::string, std::string>* flags) {
  if ((*flags)["--tls-cert"].empty()) return grpc::InsecureServerCredentials();
  grpc::SslServerCredentialsOptions options(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = ReadFile((*flags)["--tls-ca"]);
  options.pem_key_cert_pairs.push_back({ReadFile((*flags)["--tls-key"]), ReadFile((*flags)["--tls-cert"])});
  return grpc::SslServerCredentials(options);
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::string> flags;
  for (int i = 1; i + 1 < argc; i += 2) flags[argv[i]] = argv[i + 1];

  QueryStack stack;
  const RunId ill = stack.AddRun({.name = "gpt-bf16", .stage = 1});
  stack.AddRun({.name = "gpt-fp32", .failing = {}, .ended = true, .last_report_unix_ns = 1'600'000'000'000'000'000});
  stack.Edit(ill, [](RunSnapshot* run) {
    run->alerts_firing = 1;
    run->eta = {.known = true, .steps = 1200, .lower_steps = 900, .upper_steps = 1600};
  });
  const auto post = [&stack, ill](const std::string& key, uint32_t k, Severity severity, AlertState state,
                                  const std::string& summary) {
    AlertTransition transition = stack.MakeTransition(ill, key, k, state, severity, 0);
    transition.summary = summary;
    stack.Post(transition);
  };
  const RunRecord healthy = stack.runs().Find("gpt-fp32")->record;
  if (!stack.baselines()
           .Put({.run = healthy.id,
                 .name = healthy.description.name,
                 .uuid = healthy.description.uuid,
                 .kind = KindOf(healthy.description),
                 .step = healthy.step,
                 .learned_unix_ns = healthy.started_unix_ns,
                 .bands = {{.signal = bellwether::SignalId::kDriftRatio,
                            .range = 3,
                            .values = 96,
                            .quantiles = {0.25f, 0.4f, 0.5f, 0.6f, 0.75f, 1, 1.25f, 1.4f, 1.5f, 1.6f, 2}}}})
           .ok()) {
    return 1;
  }
  post("drift/1/2/220", 0, Severity::kWarning, AlertState::kFiring, "L1 H2 drifts, \"fast\"");
  post("drift/1/2/220", 1, Severity::kCritical, AlertState::kFiring, "L1 H2 drifts, \"faster\"");
  post("ties/0/3/100", 0, Severity::kInfo, AlertState::kFiring, "ties");
  post("ties/0/3/100", 1, Severity::kInfo, AlertState::kResolved, "no ties");

  AbsentPeers peers(flags["--absent"], static_cast<uint32_t>(std::atoi(flags["--unserved"].c_str())));
  RunRouter router(&peers, &stack.runs(), Clock::System());
  QueryStores stores = stack.stores();
  std::unique_ptr<AccessFiles> files;
  std::unique_ptr<Access> access;
  if (router.others()) {
    stores.router = &router;
    access = *Access::Open({}, &stack.counters(), Clock::System());
    access->SetPeers("a key of thirty-two bytes or more", [] { return Clock::System()->UnixMillis(); });
  }
  const QueryEngine engine({}, stores);
  if (!flags["--token"].empty()) {
    files = AccessFiles::WithToken(flags["--token"]);
    access = files->Open(&stack.counters());
  }
  QueryService service({.access = access.get()}, &engine);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", ListeningCredentials(&flags), &port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || port == 0) return 1;
  std::cout << "port " << port << std::endl;

  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string command, key;
    size_t bytes = 0;
    words >> command;
    if (command == "post") {
      words >> key >> bytes;
      stack.Post(stack.MakeTransition(ill, key, 0, AlertState::kFiring, Severity::kWarning, bytes));
    } else if (command == "end") {
      stack.Edit(ill, [](RunSnapshot* run) { run->record.ended = true; });
    } else if (command == "pad") {
      stack.Edit(healthy.id, [](RunSnapshot* run) {
        for (const RuleFamily family : {RuleFamily::kDrift, RuleFamily::kTies, RuleFamily::kLogits}) {
          const auto first = run->record.coverage.missed.begin() + 3 * static_cast<int>(family);
          std::fill(first, first + 2, RunCoverage::kNever);
        }
      });
    } else if (command == "unreported" || command == "nan") {
      stack.Edit(healthy.id, [&command](RunSnapshot* run) {
        std::vector<bellwether::SignalId>& signals = run->record.signals;
        const bool is_nan = command == "nan";
        auto newest = std::make_shared<StepSample>(*run->newest);
        newest->Add(bellwether::SignalId::kLoss)[0] = is_nan ? std::numeric_limits<float>::quiet_NaN() : NotMeasured();
        run->newest = newest;
        std::erase(signals, bellwether::SignalId::kLoss);
        if (is_nan) signals.push_back(bellwether::SignalId::kLoss);
        run->record.coverage.loss_step = is_nan ? run->record.step : -1;
      });
    } else if (command == "export") {
      words >> bytes;
      stack.set_exported("BWRUN" + std::string(bytes, 'x'));
    }
    std::cout << "ok" << std::endl;
  }
  service.Shutdown();
  server->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(5));
  return 0;
}
