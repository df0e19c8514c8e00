// output.h: how results look: a table for people, JSON, YAML and CSV for
// programs.
//
// Data goes to stdout, everything else to stderr.  JSON is protobuf's mapping
// with the field names of the .proto files; YAML is the same tree.  On a terminal
// tables are made to fit (layout.h), times are told from now, and there are
// colours (NO_COLOR: none).  What a server sent can hold no control characters
// in a table.

#ifndef BELLWETHER_CLI_OUTPUT_H_
#define BELLWETHER_CLI_OUTPUT_H_

#include <google/protobuf/message.h>

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "bellwether/v1/query.pb.h"
#include "cli/layout.h"

namespace bellwether::cli {

enum class Format { kTable, kJson, kYaml, kCsv };

struct OutputOptions {
  Format format = Format::kTable;
  bool headers = true;
  bool wide = false;  // On a terminal, too: every column, a line each, times as dates.
};

// Whether what is shown is for people's eyes: a table on a terminal, not --wide.
// False until SetForPeople() was called with the flags as parsed.
bool ForPeople();
void SetForPeople(const OutputOptions& options);

// Prints `table` or `message`, whichever the format wants.
void Print(const OutputOptions& options, const Table& table, const google::protobuf::Message& message);
// One item of a stream: a table's rows without its header unless `first`, JSON
// on one line, YAML as a document of its own.  Flushes; false: the reader is
// gone.
bool PrintItem(const OutputOptions& options, const Table& table, const google::protobuf::Message& message, bool first);

// Several tables under titles; for what has more than one face.
struct Section {
  std::string title;
  Table table;
};
void Print(const OutputOptions& options, const std::vector<Section>& sections,
           const google::protobuf::Message& message);

std::string ToJson(const google::protobuf::Message& message, bool pretty);
// Of a JSON text.
std::string ToYaml(const std::string& json);

// "1.25", "NaN"; at most `digits` significant ones.
std::string Number(double value, int digits = 6);
std::string Integer(int64_t value);  // "-" for a negative one
std::string Date(int64_t unix_ns);   // RFC 3339 in UTC; "-" for 0
// As Date(); for people from now: "14 min ago", "in 5 min".
std::string Time(int64_t unix_ns);
int64_t NowUnixNs();
std::string Stage(uint32_t stage);  // "3 norm"
// The run's; without an alert what is said of it: "0 healthy", "0 nothing found in 5 steps", "0 judged by: leak".
std::string Stage(const v1::Run& run);
// "NaN" of a loss that was so, `none` where the run has never reported one.
std::string LossText(const v1::Run& run, int digits = 6, const char* none = "-");
// "drift 0 of 12 layers, ..., loss no"; "-" from a server without that field.
std::string JudgedText(const v1::Run& run);
// "269.1 (0..343.6), 25 min"; for people "~269 (0-344), 25 min".
std::string EtaText(const v1::Eta& eta);
// The summary; for people without the run's name, which stands beside it.
std::string SummaryText(const v1::Transition& transition);
// What to do first; all of the advice where an older server does not say what comes first.
std::string DoText(const v1::Transition& transition);
// What 98 % lay between: "0.31..1.9 in 12 runs"; "-" if nothing is known.
std::string BandText(const v1::SiblingBand& band);
// Its name; for people its title: "Tied rows" for tied_fraction_bf16.
std::string SignalText(const std::string& name);
std::string HeadText(int32_t layer, int32_t head);  // "L3 H5"; "-"
const char* SeverityName(v1::Severity severity);
const char* StateName(v1::AlertState state);
std::string Hex(std::string_view bytes);

// Colours are wanted: stdout is a terminal that has them, and NO_COLOR is not
// set.
bool Colours();
// Columns of the terminal; 0 if stdout is no terminal.
size_t TerminalWidth();

// "bellwether: ..." on stderr.
void Complain(const std::string& text);

// Writes `file` under another name, `file`.part, until it is whole.  `write` says by itself why it
// has failed.  False: the reason was printed, and what had the name `file` is as it was; a FIFO or a
// device, too, which would be replaced.
bool WriteWhole(const std::string& file, const std::function<bool(std::ostream*)>& write);
// Names on stderr the servers of a cluster that did not answer, if there are
// any; `theirs` is the consequence: "runs are missing here".
void ComplainOf(const google::protobuf::RepeatedPtrField<std::string>& unanswered, const std::string& theirs);

}  // namespace bellwether::cli

#endif  // BELLWETHER_CLI_OUTPUT_H_
