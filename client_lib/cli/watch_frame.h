// watch_frame.h: what `run watch` shows of a run at one moment, as lines.

#ifndef BELLWETHER_CLI_WATCH_FRAME_H_
#define BELLWETHER_CLI_WATCH_FRAME_H_

#include <cstdint>
#include <string>
#include <vector>

#include "bellwether/v1/query.pb.h"
#include "cli/heat.h"

namespace bellwether::cli {

// The server's answers of one moment.
struct RunState {
  v1::Run run;
  v1::GetMatrixResponse matrix;
  v1::TopHeadsResponse top;
  v1::ListAlertsResponse alerts;  // Firing ones.
  v1::ListActionsResponse actions;
};

struct FrameOptions {
  size_t width = 80;
  bool cut = false;   // Lines that are longer; else only the strip keeps to it.
  size_t height = 0;  // Lines; 0 = as many as it takes.
  Palette palette = Palette::kPlain;
};

// `trouble`: why what is shown is not of now; empty = it is.
std::vector<std::string> Frame(const RunState& state, const std::string& trouble, int64_t now_unix_ns,
                               const FrameOptions& options);

}  // namespace bellwether::cli

#endif  // BELLWETHER_CLI_WATCH_FRAME_H_
