// layout.h: a table as lines that fit a terminal, with nothing cut off.

#ifndef BELLWETHER_CLI_LAYOUT_H_
#define BELLWETHER_CLI_LAYOUT_H_

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace bellwether::cli {

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
  bool fit = true;  // Into the terminal's width; else its maker has seen to that.
  // Sentences: wrapped where there is no room.  Empty = the last column.
  std::vector<std::string> texts = {};
  // Columns to leave out where there is no room, the first of these first.
  std::vector<std::string> spare = {};
  bool texts_below = false;         // Below their line, even where they would fit into it.
  std::vector<size_t> widths = {};  // Of columns, at least; so that lines of a stream stand below each other.
};

// Columns that a UTF-8 text takes, near enough: continuation bytes take none.
size_t Width(const std::string& text);
// The part of `text` that fits; never half a character.
std::string CutTo(const std::string& text, size_t width);
// Without control characters: what others sent must not steer a terminal.
std::string Clean(const std::string& text);
// `text` in lines of at most `width` columns, broken between words where that can be.  At least one.
std::vector<std::string> Wrap(const std::string& text, size_t width);

// How wide each column of a table is with all that it holds.
std::vector<size_t> ColumnWidths(const Table& table, bool headers);
// The lines of a table, none longer than `width` columns; 0 = one line a row, however long.
// `left_out`, where given, gets the names of the spare columns that had no room.
std::vector<std::string> Lines(const Table& table, bool headers, size_t width, bool colours,
                               std::vector<std::string>* left_out = nullptr);

}  // namespace bellwether::cli

#endif  // BELLWETHER_CLI_LAYOUT_H_
