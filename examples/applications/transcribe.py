"""Transcribe a WAV file over the realtime route: python transcribe.py speech.wav [--language en]

The file holds 16-bit samples of one channel, 16,000 or 24,000 a second. The audio is sent in pieces, as from a
microphone, and the text is printed as it arrives. Needs: pip install websockets
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import wave
from collections.abc import Iterator

from websockets.sync.client import ClientConnection, connect

URL = os.environ.get("LMI_URL", "http://127.0.0.1:8080")
KEY = os.environ.get("LMI_API_KEY", "")
EVENT = "conversation.item.input_audio_transcription"
PIECE_SECONDS = 0.5


def pieces(path: str) -> tuple[int, list[bytes]]:
    """Return the sample rate and the audio in pieces."""
    with wave.open(path) as file:
        if (file.getnchannels(), file.getsampwidth()) != (1, 2) or file.getframerate() not in (16000, 24000):
            sys.exit(f"{path}: must have one channel of 16-bit samples, 16,000 or 24,000 a second")
        rate = file.getframerate()
        audio = file.readframes(file.getnframes())
    size = 2 * int(PIECE_SECONDS * rate)
    return rate, [audio[start : start + size] for start in range(0, len(audio), size)]


def send(socket: ClientConnection, **event: object) -> None:
    socket.send(json.dumps(event))


def transcript(socket: ClientConnection) -> Iterator[str]:
    """Yield the pieces of the text until the transcript is complete."""
    for message in socket:
        event = json.loads(message)
        if event["type"] == "error" or event["type"] == f"{EVENT}.failed":
            sys.exit(f"the server refused: {event['error']['message']}")
        if event["type"] == f"{EVENT}.delta":
            yield event["delta"]
        if event["type"] == f"{EVENT}.completed":
            return
    sys.exit("the server closed the connection")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--language", help="language of the speech, such as en (default: detected)")
    arguments = parser.parse_args()
    rate, audio = pieces(arguments.file)
    url = URL.rstrip("/").replace("http", "ws", 1) + "/v1/realtime?intent=transcription"
    headers = {"Authorization": f"Bearer {KEY}"} if KEY else {}
    settings: dict[str, object] = {"format": {"type": "audio/pcm", "rate": rate}, "turn_detection": None}
    if arguments.language:
        settings["transcription"] = {"language": arguments.language}
    with connect(url, additional_headers=headers, max_size=None) as socket:
        send(socket, type="session.update", session={"type": "transcription", "audio": {"input": settings}})
        for piece in audio:
            send(socket, type="input_audio_buffer.append", audio=base64.b64encode(piece).decode())
        send(socket, type="input_audio_buffer.commit")
        for text in transcript(socket):
            print(text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
