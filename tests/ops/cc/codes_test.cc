// Hashes and codes against published vectors; messages and causes there and back.
#include <cstring>
#include <string>

#include "check.h"
#include "transport/json.h"
#include "transport/message.h"
#include "transport/plain_text.h"
#include "transport/sha256.h"
#include "transport/siphash.h"
#include "transport/utf8.h"

namespace smp {
namespace {

std::string Hex(const Digest& digest) {
  std::string text;
  for (uint8_t byte : digest) {
    char two[3];
    std::snprintf(two, sizeof(two), "%02x", byte);
    text += two;
  }
  return text;
}

void TestSha256() {
  // FIPS 180-4 examples.
  CHECK(Hex(Sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(Hex(Sha256("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(Hex(Sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

void TestHmac() {
  // RFC 4231, cases 2 and 6 (a key longer than a block).
  CHECK(Hex(HmacSha256("Jefe", "what do ya want for nothing?")) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(Hex(HmacSha256(std::string(131, '\xaa'),
                       "Test Using Larger Than Block-Size Key - Hash Key First")) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

void TestSipHash() {
  // The example of the SipHash paper: key 00..0f, message 00..0e.
  SipKey key{0x0706050403020100u, 0x0f0e0d0c0b0a0908u};
  unsigned char message[15];
  for (int i = 0; i < 15; ++i) message[i] = static_cast<unsigned char>(i);
  SipHash whole(key);
  whole.Add(message, 15);
  CHECK(whole.Finish() == 0xa129ca6149be45e5u);
  SipHash pieces(key);
  pieces.Add(message, 3);
  pieces.Add(message + 3, 9);
  pieces.Add(message + 12, 3);
  CHECK(pieces.Finish() == 0xa129ca6149be45e5u);
}

void TestMessage() {
  const SipKey key{1, 2};
  MessageHead head{};
  head.kind = MessageKind::kAbort;
  head.ndim = 2;
  head.source = 3;
  head.key = {4, 5, 6, 7};
  const int64_t dims[] = {8, 9};
  const std::string payload = "cause";
  std::string bytes = EncodeMessage(head, dims, "a label", &key, payload);
  MessageView view;
  CHECK(DecodeMessage(bytes.data(), bytes.size(), &view));
  CHECK(view.head.source == 3 && view.head.key == head.key);
  CHECK(view.dims == std::vector<int64_t>({8, 9}));
  CHECK(view.label == "a label");
  CHECK(VerifyMessage(bytes.data(), bytes.size(), key, payload));
  CHECK(!VerifyMessage(bytes.data(), bytes.size(), SipKey{1, 3}, payload));
  CHECK(!VerifyMessage(bytes.data(), bytes.size(), key, "Cause"));
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::string changed = bytes;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    CHECK(!VerifyMessage(changed.data(), changed.size(), key, payload));
  }
  CHECK(!DecodeMessage(bytes.data(), bytes.size() - 1, &view));
  CHECK(!DecodeMessage(bytes.data(), 10, &view));
}

void TestSequenceWindow() {
  SequenceWindow window;
  CHECK(window.Accept(0));
  CHECK(!window.Accept(0));
  CHECK(window.Accept(5));
  CHECK(window.Accept(3));
  CHECK(!window.Accept(3));
  CHECK(window.Accept(200000));
  CHECK(!window.Accept(4));  // older than the window
  CHECK(window.Accept(199999));
  CHECK(!window.Accept(200000));
}

void TestJson() {
  CHECK(JsonString("a\"b\\c\n") == "\"a\\\"b\\\\c\\u000a\"");
  const std::string object =
      "{\"rank\": 1, \"kind\": \"message\", \"message\": \"a\\n\\u00e9\\ud83d\\ude00\"}";
  CHECK(JsonField(object, "message") == "a\n\xc3\xa9\xf0\x9f\x98\x80");
  CHECK(JsonField(object, "rank").empty());
  CHECK(JsonField("{\"message\": \"no end", "message") == "no end");
}

void TestJsonWithin() {
  const std::string object =
      R"({"kind": "lost", "message": ")" + std::string(5000, 'x') + R"(", "step": 3})";
  CHECK(JsonWithin(object, object.size()) == object);
  const std::string cut = JsonWithin(object, 4096);
  CHECK(cut.size() <= 4096 && cut.size() > 4080);
  CHECK(cut.substr(0, 31) == R"({"kind": "lost", "message": "xx)");
  CHECK(cut.substr(cut.size() - 19) == R"(xx ...", "step": 3})");
  // No character, and no escape, is cut in its middle; what escapes take counts.
  for (const std::string unit :
       {R"(\u00e9)", R"(\ud83d\ude00)", R"(\u0001)", "\xe6\x97\xa5", R"(\")"}) {
    std::string text;
    for (int i = 0; i < 5000; ++i) text += unit;
    for (size_t bytes = 4089; bytes <= 4096; ++bytes) {
      const std::string whole = JsonWithin(R"({"message": ")" + text + "\"}", bytes);
      CHECK(whole.size() <= bytes && whole.size() > bytes / 2);
      const std::string one = JsonField("{\"m\": \"" + unit + "\"}", "m");
      std::string message = JsonField(whole, "message");
      CHECK(message.substr(message.size() - 4) == " ...");
      message.resize(message.size() - 4);
      CHECK(message.size() % one.size() == 0);
      for (size_t at = 0; at < message.size(); at += one.size()) {
        CHECK(message.compare(at, one.size(), one) == 0);
      }
      CHECK(whole.substr(whole.size() - 6) == R"( ..."})");
    }
  }
  // Other fields leave no room for it, or there is none.
  const std::string long_kind = R"({"kind": ")" + std::string(5000, 'k') + R"(", "message": "m"})";
  CHECK(JsonWithin(long_kind, 4096) == R"({"message": "m"})");
  CHECK(JsonField(JsonWithin(std::string(5000, 'n'), 200), "message").substr(0, 9) == "nnnnnnnnn");
}

void TestUtf8Within() {
  CHECK(Utf8Within("Größe", 7) == "Größe");
  CHECK(Utf8Within("Größe", 5) == "Grö");
  CHECK(Utf8Within("Größe", 3) == "Gr");
  CHECK(Utf8Within("a\xf0\x9f\x98\x80", 4) == "a");
  CHECK(Utf8Within("", 0).empty() && Utf8Within("ö", 0).empty());
  CHECK(Utf8Within("\x80\x80\x80\x80\x80\x80", 5).size() == 5);
}

void TestPlainText() {
  CHECK(InOneLine("Größe → 3 µs, 日本 😀~") == "Größe → 3 µs, 日本 😀~");
  CHECK(PlainText("two\n\tlines\r") == "two\n\tlines\\x0d");
  CHECK(InOneLine("two\nlines") == "two lines");
  CHECK(InOneLine("\x1b[2J\x1b]0;title\x07\rover") == "\\x1b[2J\\x1b]0;title\\x07\\x0dover");
  CHECK(InOneLine(std::string("a\0b\x7f", 4)) == "a\\x00b\\x7f");
  // One control character of one terminal in one byte, in two, and in a form longer than needed.
  CHECK(InOneLine("\x9b"
                  "2J") == "\\x9b2J");
  CHECK(InOneLine("\xc2\x9b"
                  "2J") == "\\x9b2J");
  CHECK(InOneLine("\xc0\x9b"
                  "2J") == "\\xc0\\x9b2J");
  CHECK(InOneLine("cut \xe6\x97") == "cut \\xe6\\x97");
}

}  // namespace
}  // namespace smp

int main() {
  smp::TestSha256();
  smp::TestHmac();
  smp::TestSipHash();
  smp::TestMessage();
  smp::TestSequenceWindow();
  smp::TestJson();
  smp::TestJsonWithin();
  smp::TestUtf8Within();
  smp::TestPlainText();
  std::puts("codes_test: ok");
  return 0;
}
