"""The sample clip, tiled to a larger size and repeated: tile.py CLIP.y4m OUT.y4m WIDTH HEIGHT FRAMES."""

import sys
clip = open(sys.argv[1], "rb").read()
end = clip.index(b"\n")
frames = [f for f in clip[end + 1:].split(b"FRAME\n") if f]
w, h = 352, 288
def tiled(plane, w, h, W, H):
    rows = [(plane[y * w:(y + 1) * w] * (W // w + 1))[:W] for y in range(h)]
    return b"".join(rows[y % h] for y in range(H))
made = []
W, H, count = map(int, sys.argv[3:])
for f in frames:
    y, u, v = f[:w * h], f[w * h:w * h * 5 // 4], f[w * h * 5 // 4:]
    made.append(b"FRAME\n" + tiled(y, w, h, W, H) + tiled(u, w // 2, h // 2, W // 2, H // 2) + tiled(v, w // 2, h // 2, W // 2, H // 2))
with open(sys.argv[2], "wb") as out:
    out.write(b"YUV4MPEG2 W%d H%d F25:1 Ip A1:1 C420jpeg\n" % (W, H))
    for k in range(count):
        out.write(made[k % len(made)])
