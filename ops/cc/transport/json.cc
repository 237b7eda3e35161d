#include "transport/json.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "transport/utf8.h"

namespace smp {
namespace {

void AppendUtf8(uint32_t code, std::string* out) {
  if (code < 0x80) {
    out->push_back(static_cast<char>(code));
  } else if (code < 0x800) {
    out->push_back(static_cast<char>(0xc0 | code >> 6));
    out->push_back(static_cast<char>(0x80 | (code & 0x3f)));
  } else if (code < 0x10000) {
    out->push_back(static_cast<char>(0xe0 | code >> 12));
    out->push_back(static_cast<char>(0x80 | (code >> 6 & 0x3f)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3f)));
  } else {
    out->push_back(static_cast<char>(0xf0 | code >> 18));
    out->push_back(static_cast<char>(0x80 | (code >> 12 & 0x3f)));
    out->push_back(static_cast<char>(0x80 | (code >> 6 & 0x3f)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3f)));
  }
}

// Four hexadecimal digits at `at`, or -1.
int32_t HexAt(std::string_view text, size_t at) {
  if (at + 4 > text.size()) return -1;
  int32_t value = 0;
  for (char c : text.substr(at, 4)) {
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

// Reads the string literal that begins at text[*at] == '"'; leaves *at behind it.
std::string ReadString(std::string_view text, size_t* at) {
  std::string out;
  size_t i = *at + 1;
  for (; i < text.size() && text[i] != '"'; ++i) {
    if (text[i] != '\\') {
      out.push_back(text[i]);
      continue;
    }
    if (++i >= text.size()) break;
    switch (text[i]) {
      case 'n':
        out.push_back('\n');
        break;
      case 't':
        out.push_back('\t');
        break;
      case 'r':
        out.push_back('\r');
        break;
      case 'b':
        out.push_back('\b');
        break;
      case 'f':
        out.push_back('\f');
        break;
      case 'u': {
        int32_t code = HexAt(text, i + 1);
        if (code < 0) break;
        i += 4;
        if (code >= 0xd800 && code < 0xdc00 && text.substr(i + 1, 2) == "\\u") {
          const int32_t low = HexAt(text, i + 3);
          if (low >= 0xdc00 && low < 0xe000) {
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
            i += 6;
          }
        }
        AppendUtf8(static_cast<uint32_t>(code), &out);
        break;
      }
      default:
        out.push_back(text[i]);
    }
  }
  *at = i + 1;
  return out;
}

// The value of the first string field of this name, and where its literal stands; *end is 0 if
// there is none.
std::string FindField(std::string_view object, std::string_view name, size_t* begin, size_t* end) {
  for (size_t i = 0; i < object.size();) {
    if (object[i] != '"') {
      ++i;
      continue;
    }
    const std::string word = ReadString(object, &i);
    if (word != name) continue;
    size_t j = i;
    while (j < object.size() && (object[j] == ' ' || object[j] == '\n')) ++j;
    if (j >= object.size() || object[j] != ':') continue;
    ++j;
    while (j < object.size() && (object[j] == ' ' || object[j] == '\n')) ++j;
    if (j >= object.size() || object[j] != '"') continue;
    *begin = j;
    std::string value = ReadString(object, &j);
    *end = std::min(j, object.size());
    return value;
  }
  *end = 0;
  return "";
}

}  // namespace

std::string JsonString(std::string_view text) {
  std::string out = "\"";
  for (char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (byte < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", byte);
      out += escaped;
    } else {
      out.push_back(c);
    }
  }
  return out + "\"";
}

std::string JsonField(std::string_view object, std::string_view name) {
  size_t begin = 0, end = 0;
  return FindField(object, name, &begin, &end);
}

std::string JsonWithin(const std::string& object, size_t bytes) {
  if (object.size() <= bytes) return object;
  size_t begin = 0, end = 0;
  std::string message = FindField(object, "message", &begin, &end);
  std::string before = object.substr(0, begin), behind = object.substr(end);
  constexpr size_t kLeastMessage = 50;  // bytes in which something can be said
  if (end == 0 || before.size() + behind.size() + kLeastMessage > bytes) {
    if (end == 0) message = object;
    before = "{\"message\": ";
    behind = "}";
  }
  constexpr char kMore[] = " ...";
  const size_t room = bytes - before.size() - behind.size() - sizeof("\"\"") - sizeof(kMore);
  // An escaped byte takes up to six.
  size_t taken = message.size();
  std::string_view cut = message;
  while (JsonString(cut).size() > room) {
    taken = std::min(taken - 1, std::max(room / 6, taken * room / JsonString(cut).size()));
    cut = Utf8Within(message, taken);
  }
  return before + JsonString(std::string(cut) + (cut.size() < message.size() ? kMore : "")) +
         behind;
}

}  // namespace smp
