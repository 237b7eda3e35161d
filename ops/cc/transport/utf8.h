// Text in UTF-8, cut where a character ends.
#ifndef SMP_TF_OPS_CC_TRANSPORT_UTF8_H_
#define SMP_TF_OPS_CC_TRANSPORT_UTF8_H_

#include <cstddef>
#include <string_view>

namespace smp {

// As much of the text's begin as so many bytes hold.
inline std::string_view Utf8Within(std::string_view text, size_t bytes) {
  if (text.size() <= bytes) return text;
  const auto continues = [&](size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80;
  };
  size_t end = bytes;
  while (end > 0 && bytes - end < 4 && continues(end)) --end;
  // Not UTF-8: any place is as good.
  if (continues(end)) end = bytes;
  return text.substr(0, end);
}

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_UTF8_H_
