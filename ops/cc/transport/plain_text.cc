#include "transport/plain_text.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>

namespace smp {
namespace {

// Bytes of the UTF-8 character that begins at `at`; 0 where there is none.
size_t CharacterAt(const std::string& text, size_t at, uint32_t* code) {
  const auto first = static_cast<unsigned char>(text[at]);
  const size_t bytes = first < 0x80           ? 1
                       : (first >> 5) == 0x06 ? 2
                       : (first >> 4) == 0x0e ? 3
                       : (first >> 3) == 0x1e ? 4
                                              : 0;
  if (bytes == 0 || at + bytes > text.size()) return 0;
  *code = bytes == 1 ? first : first & (0xffu >> (bytes + 1));
  for (size_t i = 1; i < bytes; ++i) {
    const auto next = static_cast<unsigned char>(text[at + i]);
    if ((next >> 6) != 0x02) return 0;
    *code = *code << 6 | (next & 0x3f);
  }
  // A longer form than needed is no character: it would hide one that is looked for here.
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  return *code >= kLeast[bytes] ? bytes : 0;
}

bool IsControl(uint32_t code) {
  return (code < 0x20 && code != '\n' && code != '\t') || (code >= 0x7f && code < 0xa0);
}

}  // namespace

std::string PlainText(const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    uint32_t code = 0;
    const size_t bytes = CharacterAt(text, at, &code);
    if (bytes > 0 && !IsControl(code)) {
      out.append(text, at, bytes);
    } else {
      char words[8];
      const unsigned shown = bytes > 0 ? code : static_cast<unsigned char>(text[at]);
      std::snprintf(words, sizeof(words), "\\x%02x", shown);
      out += words;
    }
    at += bytes > 0 ? bytes : 1;
  }
  return out;
}

std::string InOneLine(const std::string& text) {
  std::string line = PlainText(text);
  std::replace(line.begin(), line.end(), '\n', ' ');
  return line;
}

}  // namespace smp
