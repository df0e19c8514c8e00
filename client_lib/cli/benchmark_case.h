// benchmark_case.h: a run whose alerts were false alarms, as a case of the benchmark of
// instabilities (instabilities/README.md).

#ifndef BELLWETHER_CLI_BENCHMARK_CASE_H_
#define BELLWETHER_CLI_BENCHMARK_CASE_H_

#include <string>

#include "cli/connect.h"
#include "cli/exit_code.h"

namespace bellwether::cli {

// Writes DIR/NAME.bwrun, NAME.csv and, last, NAME.json: a healthy run, with the
// marks of its false alarms and the steps between two of its samples.
// NAME is the run's name and the beginning of its uuid.  What fails is printed.
ExitCode WriteBenchmarkCase(Connection* connection, const std::string& run, const std::string& directory);

}  // namespace bellwether::cli

#endif  // BELLWETHER_CLI_BENCHMARK_CASE_H_
