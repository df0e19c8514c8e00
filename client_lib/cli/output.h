// output.h: how results look: a table for people, JSON, YAML and CSV for
// programs.
//
// Data goes to stdout, everything else to stderr.  JSON is protobuf's mapping
// with the field names of the .proto files; YAML is the same tree.  Tables are
// cut to the terminal's width and coloured only on a terminal (NO_COLOR: not
// even there).  What a server sent can hold no control characters in a table.

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

namespace bellwether::cli {

enum class Format { kTable, kJson, kYaml, kCsv };

struct OutputOptions {
  Format format = Format::kTable;
  bool headers = true;
};

struct Cell {
  Cell(std::string t) : text(std::move(t)) {}  // NOLINT: a cell is a text.
  Cell(const char* t) : text(t) {}             // NOLINT
  Cell(std::string t, int c) : text(std::move(t)), colour(c) {}
  std::string text;
  int colour = -1;  // One of the terminal's 256, -1 = none.
};

struct Table {
  std::vector<std::string> columns;
  std::vector<std::vector<Cell>> rows;
  bool cut = true;  // To the terminal's width.
};

// Prints `table` or `message`, whichever the format wants.
void Print(const OutputOptions& options, const Table& table, const google::protobuf::Message& message);
// One item of a stream: a table's rows without its header unless `first`, JSON
// on one line, YAML as a document of its own.  Flushes; false: the reader is
// gone.
bool PrintItem(const OutputOptions& options, const Table& table, const google::protobuf::Message& message, bool first);

// The lines of a table, cut to `width` columns (0 = whole).
std::vector<std::string> Lines(const Table& table, bool headers, size_t width, bool colours);

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
std::string Time(int64_t unix_ns);   // RFC 3339 in UTC; "-" for 0
std::string Stage(uint32_t stage);   // "3 norm"
// The run's; without an alert what it is judged by: "0 healthy", "0 judged by: leak".
std::string Stage(const v1::Run& run);
// "drift 0 of 12 layers, ..., loss no"; "-" from a server without that field.
std::string JudgedText(const v1::Run& run);
std::string EtaText(const v1::Eta& eta);
// What 98 % lay between: "0.31..1.9 in 12 runs"; "-" if nothing is known.
std::string BandText(const v1::SiblingBand& band);
std::string HeadText(int32_t layer, int32_t head);  // "L3 H5"; "-"
const char* SeverityName(v1::Severity severity);
const char* StateName(v1::AlertState state);
std::string Hex(std::string_view bytes);

// Columns that a UTF-8 text takes, near enough: continuation bytes take none.
size_t Width(const std::string& text);
// The part of `text` that fits; never half a character.
std::string CutTo(const std::string& text, size_t width);
// Without control characters: what others sent must not steer a terminal.
std::string Clean(const std::string& text);

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
