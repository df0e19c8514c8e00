// service_stack.h: the service without its ports: the engine and the query
// engine on a folder, which recorded runs are imported into.

#ifndef BELLWETHER_TESTS_SUPPORT_SERVICE_STACK_H_
#define BELLWETHER_TESTS_SUPPORT_SERVICE_STACK_H_

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/engine.h"
#include "server/query/query_engine.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {

class ServiceStack {
 public:
  explicit ServiceStack(Engine::Options options = {}) : options_(std::move(options)) {
    options_.storage_path = directory_.path() + "/data";
    Open();
  }

  // Ends as an operator ends it, and starts again with what it had stored.
  void Restart() {
    queries_.reset();
    EXPECT_TRUE(engine_->Close().ok());
    engine_.reset();
    Open();
  }

  // tests/testdata/`file`, as a run called `name`; whole and judged, and what
  // can be learned from it learned.
  RunId Import(const std::string& file, const std::string& name) {
    std::ifstream in(std::string(BELLWETHER_TESTDATA) + "/" + file, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    const std::unique_ptr<RunImport> import = engine_->control()->StartImport(name, false);
    const absl::Status fed = import->Feed(bytes);
    EXPECT_TRUE(fed.ok()) << file << ": " << fed;
    const auto result = import->Finish();
    EXPECT_TRUE(result.ok()) << file << ": " << result.status();
    engine_->AwaitLearned();
    return result.ok() ? result->run : 0;
  }

  std::vector<AlertTransition> Transitions(RunId run) {
    const auto found = engine_->alerts()->Read(0, 10'000, run);
    EXPECT_TRUE(found.ok());
    return found.ok() ? *found : std::vector<AlertTransition>{};
  }

  Engine& engine() { return *engine_; }
  const QueryEngine& queries() { return *queries_; }
  double count(const std::string& name, const Labels& labels) { return counters_.counter(name, labels)->value(); }

 private:
  void Open() {
    auto opened = Engine::Open(options_, &counters_, Clock::System());
    ASSERT_TRUE(opened.ok()) << opened.status();
    engine_ = *std::move(opened);
    engine_->AwaitLearned();
    queries_ = std::make_unique<QueryEngine>(
        QueryEngine::Options(),
        QueryStores{engine_->runs(), engine_->series(), engine_->alerts(), engine_->database(), engine_->baselines(),
                    engine_->control(), Clock::System(), &counters_, engine_->actions()});
  }

  TempDirectory directory_;
  Engine::Options options_;
  Counters counters_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<QueryEngine> queries_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_SERVICE_STACK_H_
