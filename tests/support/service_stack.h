// service_stack.h: the service without its ports: the pipeline and the query
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

#include "server/engine/pipeline.h"
#include "server/query/query_engine.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {

class ServiceStack {
 public:
  explicit ServiceStack(Pipeline::Options options = {}) : options_(std::move(options)) {
    options_.storage_path = directory_.path() + "/data";
    Open();
  }

  // Ends as an operator ends it, and starts again with what it had stored.
  void Restart() {
    engine_.reset();
    EXPECT_TRUE(pipeline_->Close().ok());
    pipeline_.reset();
    Open();
  }

  // tests/testdata/`file`, as a run called `name`; whole and judged, and what
  // can be learned from it learned.
  RunId Import(const std::string& file, const std::string& name) {
    std::ifstream in(std::string(BELLWETHER_TESTDATA) + "/" + file, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    const std::unique_ptr<RunImport> import = pipeline_->StartImport(name, false);
    const absl::Status fed = import->Feed(bytes);
    EXPECT_TRUE(fed.ok()) << file << ": " << fed;
    const auto result = import->Finish();
    EXPECT_TRUE(result.ok()) << file << ": " << result.status();
    pipeline_->AwaitLearned();
    return result.ok() ? result->run : 0;
  }

  std::vector<AlertTransition> Transitions(RunId run) {
    const auto found = pipeline_->alerts()->Read(0, 10'000, run);
    EXPECT_TRUE(found.ok());
    return found.ok() ? *found : std::vector<AlertTransition>{};
  }

  Pipeline& pipeline() { return *pipeline_; }
  const QueryEngine& engine() { return *engine_; }
  double count(const std::string& name, const Labels& labels) { return counters_.counter(name, labels)->value(); }

 private:
  void Open() {
    auto opened = Pipeline::Open(options_, &counters_, Clock::System());
    ASSERT_TRUE(opened.ok()) << opened.status();
    pipeline_ = *std::move(opened);
    pipeline_->AwaitLearned();
    engine_ = std::make_unique<QueryEngine>(
        QueryEngine::Options(),
        QueryStores{pipeline_->runs(), pipeline_->series(), pipeline_->alerts(), pipeline_->database(),
                    pipeline_->baselines(), pipeline_.get(), Clock::System(), &counters_, pipeline_->actions()});
  }

  TempDirectory directory_;
  Pipeline::Options options_;
  Counters counters_;
  std::unique_ptr<Pipeline> pipeline_;
  std::unique_ptr<QueryEngine> engine_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_SERVICE_STACK_H_
