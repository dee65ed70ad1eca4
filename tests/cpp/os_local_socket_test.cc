#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "format/names.h"
#include "os/local_socket.h"

namespace torch_ckpt {
namespace {

class LocalSocketTest : public testing::Test {
 protected:
  LocalSocketTest() : name_("torch_ckpt-test-" + NewId()) {}
  // A listener and both ends of a connection.
  void Meet() {
    auto listener = LocalListener::Listen(name_);
    ASSERT_TRUE(listener.ok()) << listener.status().ToString();
    auto here = LocalSocket::Connect(name_);
    ASSERT_TRUE(here.ok() && here->has_value());
    auto there = listener->Accept(patient_);
    ASSERT_TRUE(there.ok());
    here_.emplace(std::move(**here));
    there_.emplace(std::move(there).value());
  }

  const StillWanted patient_ = [] { return Status(); };
  const std::string name_;
  std::optional<LocalSocket> here_, there_;
};

TEST_F(LocalSocketTest, NobodyThere) {
  auto socket = LocalSocket::Connect(name_);
  ASSERT_TRUE(socket.ok()) << socket.status().ToString();
  EXPECT_FALSE(socket->has_value());
}

TEST_F(LocalSocketTest, ANameIsOneListeners) {
  auto first = LocalListener::Listen(name_);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(LocalListener::Listen(name_).status().kind(), ErrorKind::kConflict);
  EXPECT_FALSE(LocalListener::Listen(std::string(200, 'x')).ok());
}

TEST_F(LocalSocketTest, MessagesAndDescriptors) {
  Meet();
  const std::string large(5 << 20, 'm');  // more than a socket holds
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const File in(ends[1], "pipe");
  File out(ends[0], "pipe");
  std::thread sender([&] {
    EXPECT_TRUE(here_->Send("", patient_).ok());
    EXPECT_TRUE(here_->Send(large, patient_, out.fd()).ok());
    EXPECT_TRUE(here_->Send("last", patient_).ok());
  });
  auto first = there_->Receive(patient_);
  auto second = there_->Receive(patient_);
  auto third = there_->Receive(patient_);
  sender.join();
  ASSERT_TRUE(first.ok() && second.ok() && third.ok());
  EXPECT_EQ(first->text, "");
  EXPECT_FALSE(first->descriptor.valid());
  EXPECT_TRUE(second->text == large);
  EXPECT_FALSE(third->descriptor.valid());
  // The same pipe, through a descriptor of its own.
  ASSERT_TRUE(second->descriptor.valid());
  ASSERT_EQ(write(in.fd(), "x", 1), 1);
  char read_back = 0;
  EXPECT_EQ(read(second->descriptor.fd(), &read_back, 1), 1);
  EXPECT_EQ(read_back, 'x');
}

TEST_F(LocalSocketTest, ADescriptorThatFindsNoRoomIsAnError) {
  Meet();
  const File sent(dup(0), "sent");
  ASSERT_TRUE(here_->Send("with a descriptor", patient_, sent.fd()).ok());
  ASSERT_TRUE(here_->Send("without", patient_).ok());
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  // Every number up to the next free one is taken.
  const rlimit full{static_cast<rlim_t>(File(dup(0), "next").fd()),
                    before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &full), 0);
  const Status status = there_->Receive(patient_).status();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(status.kind(), ErrorKind::kExhausted);
  EXPECT_NE(status.message().find("out of descriptors"), std::string::npos)
      << status.ToString();
}

TEST_F(LocalSocketTest, APeerThatEnds) {
  Meet();
  EXPECT_FALSE(there_->PeerIsGone());
  ASSERT_TRUE(here_->Send("still to be read", patient_).ok());
  here_.reset();
  EXPECT_FALSE(there_->PeerIsGone());
  EXPECT_EQ(there_->Receive(patient_)->text, "still to be read");
  EXPECT_TRUE(there_->PeerIsGone());
  EXPECT_EQ(there_->Receive(patient_).status().kind(), ErrorKind::kIncomplete);
  EXPECT_EQ(there_->Send("x", patient_).kind(), ErrorKind::kIncomplete);
}

TEST_F(LocalSocketTest, APeerThatIsKilled) {
  auto listener = LocalListener::Listen(name_);
  ASSERT_TRUE(listener.ok());
  const pid_t child = fork();
  if (child == 0) {
    auto socket = LocalSocket::Connect(name_);
    pause();
    _exit(0);
  }
  auto there = listener->Accept(patient_);
  ASSERT_TRUE(there.ok());
  EXPECT_FALSE(there->PeerIsGone());
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(there->PeerIsGone());
}

TEST_F(LocalSocketTest, WaitingEndsWhenItIsNotWanted) {
  Meet();
  int asked = 0;
  const StillWanted wanted = [&] {
    return ++asked < 3 ? Status() : Cancelled("enough");
  };
  EXPECT_EQ(there_->Receive(wanted).status().kind(), ErrorKind::kCancelled);
  EXPECT_EQ(asked, 3);
  auto listener = LocalListener::Listen(name_ + "-other");
  ASSERT_TRUE(listener.ok());
  EXPECT_EQ(listener->Accept(wanted).status().kind(), ErrorKind::kCancelled);
}

}  // namespace
}  // namespace torch_ckpt
